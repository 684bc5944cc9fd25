"""The README's examples run as they stand, but for the ports."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str) -> None:
    exec(compile(re.sub(r"tcp://\*:\d+", "tcp://127.0.0.1:0", example), str(README), "exec"), {})
