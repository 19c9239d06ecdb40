"""CITATION.cff and CHANGELOG.md have the form that their formats require."""

import re

import yaml
from markdown_pages import ROOT

import dcvit


def test_the_citation_names_the_software_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == dcvit.__version__
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Xiao", "Meng", "Li", "Yuan"]
    assert "2405.08553" in paper["url"]


def test_the_changelog_has_the_form_of_keep_a_changelog():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", line) for line in versions[1:])
    sections = {line for line in lines if line.startswith("### ")}
    assert sections <= {f"### {name}" for name in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")}
