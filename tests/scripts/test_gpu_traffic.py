"""The count of the bytes that a program's kernels read and write, from the text of its optimized HLO."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_traffic

# Before a loop of three steps, a sum of two arrays. Each step reads one of eight rows, and writes another in place.
TEXT = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_slice (p0: f32[8,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[8,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
}

%fused_update (p2: f32[8,100], p3: f32[1,100], p4: s32[]) -> f32[8,100] {
  %p2 = f32[8,100]{1,0} parameter(0)
  %p3 = f32[1,100]{1,0} parameter(1)
  %p4 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %updated = f32[8,100]{1,0} dynamic-update-slice(%p2, %p3, %p4, %none)
}

%body (state: (s32[], f32[8,100])) -> (s32[], f32[8,100]) {
  %state = (s32[], f32[8,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[8,100]{1,0} get-tuple-element(%state), index=1
  %read = f32[1,100]{1,0} fusion(%rows, %i), kind=kLoop, calls=%fused_slice
  %write = f32[8,100]{1,0} fusion(%rows, %read, %i), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], f32[8,100]{1,0}) tuple(%i, %write)
}

%condition (given: (s32[], f32[8,100])) -> pred[] {
  %given = (s32[], f32[8,100]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%given), index=0
  %last = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %last), direction=LT
}

ENTRY %main (x: f32[8,100], y: f32[8,100]) -> f32[] {
  %x = f32[8,100]{1,0} parameter(0)
  %y = f32[8,100]{1,0} parameter(1)
  %start = s32[] constant(0)
  %both = f32[8,100]{1,0} add(%x, %y)
  %init = (s32[], f32[8,100]{1,0}) tuple(%start, %both)
  %loop = (s32[], f32[8,100]{1,0}) while(%init), condition=%condition, body=%body
  %result = f32[8,100]{1,0} get-tuple-element(%loop), index=1
  ROOT %total = f32[] reduce(%result, %start), dimensions={0,1}, to_apply=%add
}
"""


def test_slices_updates_and_loops_count_what_they_move():
    array, row, number = 3200, 400, 4
    read, write = 2 * row + number, 2 * (row + number)
    assert gpu_traffic.traffic(TEXT) == (3 * array + 3 * (read + write) + (array + number + number), 1 + 3 * 2 + 1)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(64, 32, 16), (8, 128, 8)])
def test_a_product_reads_its_operands_and_writes_its_result(rows, inner, columns):
    compiled = jax.jit(jnp.dot).lower(jnp.ones((rows, inner)), jnp.ones((inner, columns))).compile()
    assert gpu_traffic.traffic(compiled.as_text()) == (4 * (rows * inner + inner * columns + rows * columns), 1)


def test_without_the_plugin_the_script_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"install the packages named in the description \(--help\)"):
        gpu_traffic.cuda_device()
