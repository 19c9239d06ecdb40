"""Documentation pages: their names, paths and links exist, their tables are measured results, their code works."""

import importlib
import inspect
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import input as bench_input
import jax.numpy as jnp
import native_aspect_ratio as bench_native
import numpy as np
import pytest
import reference_pages
import restart as bench_restart
import step as tpu_step
from explorer_pages import facts_of
from markdown_pages import PAGES, ROOT, blocks, commands, run_commands
from ml_collections import ConfigDict

from dcvit import aot, benchmark, cli, dcmha
from dcvit.config import load as configs
from dcvit.config import values
from dcvit.hub import pretrained

LIBRARY = "<!-- run by tests/docs/test_pages.py -->"  # before blocks that open workdirs
RUN_ELSEWHERE = "<!-- run by .* -->"  # a line before blocks that need workdirs
FOLDERS = "dcvit|input_pipeline|configs|scripts|tests|docs|examples"


def resolves(name):
    """True if a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for part in parts[at:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_every_dotted_name_resolves():
    text = "\n".join(page.read_text() for page in PAGES) + (ROOT / "docs" / "architecture.svg").read_text()
    names = set(re.findall(r"\b(?:dcvit|input_pipeline)(?:\.\w+)+", text)) - {"dcvit.COMMAND"}
    assert len(names) > 40
    assert [name for name in sorted(names) if not name.endswith((".py", ".md")) and not resolves(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_exists(page):
    text = page.read_text()
    for name in re.findall(rf"(?<![\w/.~])((?:{FOLDERS})/[\w./*-]+)", re.sub(r"\]\([^)]*\)|https?://\S+", "", text)):
        name = name.rstrip(".,")
        if not name.startswith("docs/_build"):
            assert (ROOT / name).exists() or any(ROOT.glob(name)), f"{page.name}: no {name}"
    for link in re.findall(r"(?:\]\(|href=\")([^)#\s\"]+)", text):
        assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: no {link}"


def all_commands():
    """Yield the page and the text of every command line."""
    for page in PAGES:
        for block in [*blocks(page, "sh"), *blocks(page, "bash")]:
            for command in commands(block):
                yield page.name, command


def test_every_command_in_a_code_block_has_options_that_exist():
    """Options of `dcvit` commands are those of their parsers, and shipped configs take the arguments given."""
    options = {name: parser._option_string_actions for name, parser in reference_pages.parsers().items()}
    checked = 0
    for name, command in all_commands():
        match = re.match(r"(?:python -m dcvit\.|dcvit )([\w-]+)(.*)", command)
        if match and match[1] in options:
            found = re.findall(r"\s(--?[\w-]+)(?=[\s=]|$)", match[2])
            assert not [word for word in found if word not in options[match[1]]], f"{name}: {command}"
            checked += 1
        for config, arguments in re.findall(r"configs/(\w+)\.py:(\S+)", command):
            get_config = configs._module(ROOT / "configs" / f"{config}.py").get_config
            given = {pair.split("=")[0] for pair in arguments.split(",")}
            assert given <= inspect.signature(get_config).parameters.keys(), f"{name}: {command}"
    assert checked > 30


@pytest.mark.slow
@pytest.mark.parametrize("composed", ["dynamic", "zero"])
def test_the_explanation_of_pre_and_post_is_what_compose_computes(composed):
    (block,) = [b for b in blocks(ROOT / "docs" / "tutorials" / "own_model.md", "python") if "def compose" in b]
    names: dict = {}
    exec(compile(block, "own_model.md", "exec"), names)
    rng = np.random.default_rng(0)
    shapes = [(3, 2, 4), (3, 2, 4), (3, 4), (3, 2, 4), (3, 2, 4), (3, 4), (4, 4)]  # 3 positions, rank 2, 4 heads
    weights = [(composed == "dynamic") * rng.normal(size=shape).astype(np.float32) for shape in shapes]
    one = dcmha.ComposeWeights(*weights)
    a = rng.normal(size=(1, 4, 3, 3)).astype(np.float32)
    batch = dcmha.ComposeWeights(*(jnp.asarray(w[None]) for w in weights))
    expected = np.asarray(dcmha.compose(jnp.asarray(a), batch))
    for i, j in np.ndindex(3, 3):
        np.testing.assert_allclose(names["compose"](a[0, :, i, j], one, i, j), expected[0, :, i, j], atol=1e-5)


def test_every_option_of_a_script_in_a_code_block_exists():
    checked = 0
    for name, command in all_commands():
        words = command.split(" -- ")[0]
        for script, rest in re.findall(r"(scripts/[\w/]+\.(?:py|sh))((?: [^#]*)?)", words):
            source = (ROOT / script).read_text()
            for option in re.findall(r"\s--([\w-]+)", rest):
                assert option in source, f"{name}: {script} has no option --{option}"
                checked += 1
    assert checked > 20


@pytest.mark.slow
def test_python_blocks_run_and_set_known_keys():
    """Blocks that set `config.…` run on an empty config; the others run alone."""
    found = set()
    for page in PAGES:
        for block in blocks(page, "python"):
            if re.search(f"{RUN_ELSEWHERE}\n```python\n{re.escape(block)}", page.read_text()):
                continue
            config = ConfigDict({"input": {}})
            exec(compile(block, str(page), "exec"), {"config": config})
            found |= {*config}
    assert {"mesh", "sharding_strategy"} <= found <= {*values.known_keys()}


@pytest.mark.slow
def test_blocks_of_the_library_run(digits_workdir, lm_workdir, tmp_path, monkeypatch, library_promotion):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "W").symlink_to(digits_workdir)
    (tmp_path / "runs" / "text").symlink_to(lm_workdir)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for page in ("explore.md", "library.md", "pretrained.md"):
        for block in blocks(ROOT / "docs" / page, "python", LIBRARY):
            exec(compile(block, page, "exec"), names)
    assert names["logits"].shape[:2] == (1, 9)


@pytest.mark.slow
def test_the_site_has_an_explorer_page_of_every_model_of_the_package(tmp_path, library_promotion, monkeypatch):
    """One is written here; test_site.py opens all of them in the built site."""
    import conf

    assert {*conf.EXPLORERS} == {*pretrained.names()}
    assert {len(images) + len(texts) for images, texts in conf.EXPLORERS.values()} == {2}
    source = [(ROOT / "docs" / "pretrained.md").read_text()]
    conf.link_site(None, "pretrained", source)
    assert all(f'<a href="explorer/{name}.html">' in source[0] for name in conf.EXPLORERS)
    monkeypatch.setattr(conf, "EXPLORERS", {"digits": conf.EXPLORERS["digits"]})
    conf.write_explorers(SimpleNamespace(outdir=str(tmp_path), builder=SimpleNamespace(format="html")), None)
    assert len(facts_of((tmp_path / "explorer" / "digits.html").read_text())["samples"]) == 2


def result(name):
    return json.loads((ROOT / "docs" / f"{name}.json").read_text())


def slices():
    """Every slice that a config recommends, each of which fits."""
    rows = result("aot")
    assert [(row["config"], row["topology"]) for row in rows] == configs.recommended()
    assert {row["verdict"] for row in rows} == {"fits"}
    return ["\n".join(aot.markdown(rows))]


def traffic():
    for row in result("gpu_traffic"):
        kind = "forward + backward" if row["gradient"] else "forward"
        times = f"{row['moved'] / 1e9:.1f} | {1e3 * row['moved'] / 4.8e12:.1f}"
        yield f"| {kind} | {row['row']} | {times} | {row['kernels']:,} | {row['temporary'] / 2**20:,.0f} |"


def steps_on_tpus():
    results = result("tpu_step")
    for topology in dict.fromkeys(row["topology"] for row in results):
        yield "\n".join(tpu_step.comparison([row for row in results if row["topology"] == topology]))


TABLES = [
    ("benchmark.md", lambda: cli.markdown(benchmark.summary(result("benchmark")))),
    ("tutorials/imagenet.md", lambda: bench_input.lines(result("input"))),
    ("pods.md", slices),
    ("performance_notes.md", traffic),
    ("performance_notes.md", steps_on_tpus),
]


@pytest.mark.parametrize(("page", "lines"), TABLES)
def test_tables_are_what_was_measured(page, lines):
    text = (ROOT / "docs" / page).read_text()
    assert [line for line in lines() if line not in text] == []


def test_the_times_on_a_gpu_are_those_of_their_files():
    page = (ROOT / "docs" / "performance.md").read_text()
    attention, training = result("gpu_attention"), result("gpu_training")
    shapes = {
        "vit_s16": "256 × 196 tokens, 6 heads of 64", "lm_405m": "8 × 2,048 causal tokens, 16 heads of 64",
        "lm_6.9b": "2 × 2,048 causal tokens, 32 heads of 128",
    }  # fmt: skip
    columns = [
        "plain, XLA", "plain, jax.nn", "plain, pallas_gpu", "DC, reference", "DC, elementwise", "DC, pallas_gpu",
    ]  # fmt: skip
    times = {(row["shape"], row["pass"], row["row"]): f"{row['ms']:.2f}" for row in attention}
    for shape, words in shapes.items():
        for kind in ("forward", "forward + backward"):
            assert f"| {words} | {kind} | {' | '.join(times[shape, kind, column] for column in columns)} |" in page
    steps = {row["row"]: row["ms"] for row in training if row["model"] == "405M"}
    rows = ["plain, XLA", "plain, best", "DC, best", "grouped, best", "folded, best"]
    assert f"| 405M, batch 8 | {' | '.join(str(steps[row]) for row in rows)} |" in page
    composed, folded, plain = (steps[row] for row in ("DC, best", "folded, best", "plain, best"))
    assert f"{folded / steps['grouped, best']:.2f} times the step of plain attention" in page
    assert (
        f"{folded / plain:.2f} times that of plain\nattention with 16; complete composition {composed / plain:.2f}"
        in page
    )


def test_the_training_for_equal_time_on_a_gpu_is_that_of_its_file():
    page = (ROOT / "docs" / "performance.md").read_text()
    trained = result("gpu_equal_time")
    arms = {
        "grouped": "plain, 2 key heads", "folded": "folded, 2 key heads", "folded, post": "folded, post only",
        "mha": "plain, 6 key heads",
    }  # fmt: skip
    for arm, words in arms.items():
        milliseconds = 1e3 * statistics.median(trained["seconds per step"][arm])
        bits = ", ".join(f"{value:.3f}" for value in trained["bits per byte"][arm].values())
        assert f"| {words} | {milliseconds:.1f} | {trained['steps'][arm]:,} | {bits} |" in page
    for arm in ("folded", "folded, post"):
        found = trained["differences"][arm]
        assert f"| {found['mean']:+.3f} ± {found['± 95 %']:.3f} |" in page


def test_the_table_of_layers_is_the_one_that_is_enforced():
    from test_imports import LAYERS

    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| (.+?) \| ", page.split("## Layers")[1].split("## ")[0], re.MULTILINE)[1:]
    assert table[0] == "commands, `dcvit.cli`"
    assert [sorted(re.findall(r"`([\w.]+)`", row)) for row in table[1:]] == [sorted(names) for names in LAYERS[1:]]


@pytest.mark.weekly
def test_the_commands_of_the_first_tutorial_run_as_written(tmp_path, monkeypatch, library_promotion):
    (block,) = blocks(ROOT / "docs/tutorials/first_run.md", "bash", "<!-- run by tests/docs/test_pages.py -->")
    run_commands(commands(block), tmp_path, monkeypatch)
    assert Path("runs/both.png").exists()


@pytest.mark.weekly
def test_the_commands_that_compare_runs_work_as_written(tmp_path, monkeypatch, library_promotion):
    (block,) = blocks(ROOT / "docs/tracking.md", "bash", "<!-- run by tests/docs/test_pages.py -->")
    run_commands(commands(block), tmp_path, monkeypatch)
    assert Path("runs/curves.png").exists()


@pytest.mark.parametrize(
    ("bench", "page", "name"),
    [
        (bench_restart, "fault_tolerance", "restart"),
        (bench_native, "native_aspect_ratio", "native_aspect_ratio"),
    ],
)
def test_the_complete_table_of_a_benchmark_is_that_of_its_file(bench, page, name):
    shown = (ROOT / "docs" / f"{page}.md").read_text().split(bench.BEGIN)[1].split(bench.END)[0].strip()
    assert shown == bench.table(result(name))
