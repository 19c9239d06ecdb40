"""A page of the explorer."""

import explorer_pages as pages
import pytest
from explorer_driver import MODELS, make

from dcvit.interpret.contributions import average_contributions
from dcvit.pages.explorer import average_facts


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Three samples of two runs, with averages over data and head diversity."""
    net, params, image = make("image")
    samples = [pages.sample_of(i, int(name == "plain image"), name, *make(name)) for i, name in enumerate(MODELS)]
    averages = average_facts(average_contributions(net, params, [image]), "test")
    path = tmp_path_factory.mktemp("page") / "explore.html"
    curve = {"qk": [0.2, 0.6, 1.0], "ov": [0.3, 0.7, 1.0]}
    path.write_text(pages.page(samples, averages=averages, diversity=curve))
    return path
