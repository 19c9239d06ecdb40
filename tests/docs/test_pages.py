"""Documentation pages: their names, paths and links exist, their commands and their code work."""

import importlib
import inspect
import json
import re
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
import reference_pages
from markdown_pages import PAGES, ROOT, blocks, commands
from ml_collections import ConfigDict

import dcvit
from dcvit import dcmha
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


def anchors(page):
    """The anchors of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_path_and_link_exists():
    for page in PAGES:
        text = page.read_text()
        plain = re.sub(r"\]\([^)]*\)|https?://\S+", "", text)
        for name in re.findall(rf"(?<![\w/.~])((?:{FOLDERS})/[\w./*-]+)", plain):
            name = name.rstrip(".,")
            if not name.startswith("docs/_build"):
                assert (ROOT / name).exists() or any(ROOT.glob(name)), f"{page.name}: no {name}"
        for link, anchor in re.findall(r"(?:\]\(|href=\")([^)#\s\"]*)#?([^)\s\"]*)", text):
            target = page.parent / link if link else page
            assert link.startswith("http") or target.exists(), f"{page.name}: no {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name}: no {link}#{anchor}"


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
        for config, arguments in re.findall(r"--config \W?(?:configs/)?(\w+)(?:\.py)?:([^\s\"]+)", command):
            get_config = runpy.run_path(str(ROOT / "configs" / f"{config}.py"))["get_config"]
            given = {pair.split("=")[0] for pair in re.sub(r"'.*?'", "", arguments).split(",")}
            assert given <= inspect.signature(get_config).parameters.keys(), f"{name}: {command}"
    assert checked > 30


def test_sizes_of_extras_are_those_that_the_script_wrote():
    lines = (ROOT / "docs" / "install.md").read_text().splitlines()
    rows = json.loads((ROOT / "docs" / "install.json").read_text())
    for extra, packages, megabytes in (row.values() for row in rows):
        size = "not measured | |" if packages == "–" else f"{packages} | {megabytes} |"
        assert [line for line in lines if line.startswith(f"| {extra} | ") and line.endswith(f" | {size}")], extra


@pytest.mark.slow
def test_the_explanation_of_pre_and_post_is_what_compose_computes():
    (block,) = [b for page in PAGES for b in blocks(page, "python") if "def compose" in b]
    names: dict = {}
    exec(compile(block, "own_model.md", "exec"), names)
    rng = np.random.default_rng(0)
    shapes = [(3, 2, 4), (3, 2, 4), (3, 4), (3, 2, 4), (3, 2, 4), (3, 4), (4, 4)]  # 3 positions, rank 2, 4 heads
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
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
    assert checked > 15


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


WITH_LIBRARY = [page for page in PAGES if blocks(page, "python", LIBRARY)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.name == "python.md" else pytest.mark.weekly) for page in WITH_LIBRARY],
    ids=lambda page: page.name,
)
def test_blocks_of_the_library_run(digits_workdir, lm_workdir, tmp_path, monkeypatch, library_promotion, page):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "W").symlink_to(digits_workdir)
    (tmp_path / "runs" / "text").symlink_to(lm_workdir)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page, "python", LIBRARY):
        if "= train(" not in block:
            exec(compile(block, str(page), "exec"), names)
    assert page.name != "python.md" or names["logits"].shape[:2] == (1, 9)


@pytest.mark.weekly
def test_the_block_that_trains_runs(tmp_path, monkeypatch, library_promotion):
    """tests/training/test_run.py trains a smaller model with the same call."""
    monkeypatch.chdir(tmp_path)
    (block,) = (b for page in WITH_LIBRARY for b in blocks(page, "python", LIBRARY) if "= train(" in b)
    exec(compile(block, "python.md", "exec"), {"dcvit": dcvit})
    assert (tmp_path / "runs" / "short" / "metrics.jsonl").exists()


def test_the_site_links_an_explorer_page_of_every_model_of_the_package():
    import conf

    assert {*conf.EXPLORERS} == {*pretrained.names()}
    assert {len(images) + len(texts) for images, texts in conf.EXPLORERS.values()} == {2}
    for page in ("index", "quickstart"):
        source = [(ROOT / "docs" / f"{page}.md").read_text()]
        conf.link_site(None, page, source)
        assert all(f'<a href="explorer/{name}.html">' in source[0] for name in conf.EXPLORERS)
