"""Handler of `input_pipeline.limited_worker` that renders Jinja templates of tasks in Jinja's sandbox.

A request is a pickled template with the values of its variables, the reply is the text. Filters and options are those
of the library `lm_eval`, which is not imported because that takes a second.
"""

import functools
import pickle
import re

MAX_CHARACTERS = 1 << 24  # of the text of one document


class Handler:
    """Jinja's sandbox, which keeps a template from Python's internals, through which it could run code."""

    def __init__(self) -> None:
        import jinja2.sandbox

        options = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
        self.environment = jinja2.sandbox.SandboxedEnvironment(**options)
        self.environment.filters["regex_replace"] = _regex_replace
        self.compiled = functools.lru_cache(self.environment.from_string)

    def __call__(self, request: list[bytes]) -> list[bytes]:
        """Render a template. Raises ValueError if the text is too long."""
        template, values = pickle.loads(request[0])  # from the parent process
        text = self.compiled(template).render(values)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"the text has {len(text):,} characters, more than the limit of {MAX_CHARACTERS:,}")
        return [text.encode(errors="surrogatepass")]


def _regex_replace(string: str, pattern: str, repl: str, count: int = 0) -> str:
    """Replace the matches of a regular expression."""
    return re.sub(pattern, repl, string, count=count)
