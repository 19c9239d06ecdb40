"""The page about installation lists all extras."""

import re
import tomllib

from markdown_pages import ROOT

PAGE = (ROOT / "docs" / "install.md").read_text()


def test_its_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = PAGE.split("## Extras")[1].split("## Sizes")[0]
    listed = {
        name: includes
        for names, includes in re.findall(r"^\| (`.+?`) \| .+ \| (\w*) ?\|$", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == {
        name: "" if name == "train" else "yes" if "dcvit[train]" in needs else "no" for name, needs in extras.items()
    }
