"""A judge's template is a stranger's text, perhaps: it reaches nothing but its values, and makes nothing huge.
Refused at submit, with the key and the reason."""

import time

import pytest

from pipeline.core.errors import ConfigError
from stages.genrm.prompt import check_template
from tests.cli.conftest import Pivot, pivot

__all__ = ["pivot"]

ESCAPES = [
    "{{ response.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ (response | attr('__class__')).__base__ }}",
    "{{ response['__class__']['__mro__'] }}",
    "{{ '{0.__class__.__mro__}'.format(response) }}",
    "{{ messages.__add__.__self__.__class__ }}",
    "{% set f = range.__init__ %}{{ f.__globals__ }}",
]
"""Each would be a way out in Jinja without a sandbox."""
CHANGES = ["{{ messages.clear() }}", "{{ messages.append(1) }}", "{{ messages[0].update(content='x') }}"]
HUGE = {
    "{% for i in range(10 * 1000 * 1000 * 1000) %}x{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}": "more than 1048576 characters",
    "{{ response * 10000000000 }}": "repeats a text 10000000000 times",
    "{{ 10000000000 * 'x' }}": "repeats a text 10000000000 times",
    "{{ ([0] * 10000000000) | length }}": "repeats a text",
    "{{ 9 ** 999999999 }}": "powers are not computed",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ lipsum(n=100000000) }}": "unknown variable 'lipsum'",
    "{{ messages | random }}": "random",
}


@pytest.mark.parametrize("part", [*ESCAPES, *CHANGES])
def test_a_template_reaches_nothing_but_its_values(part: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.genrm\.template: it fails on the response 'a response': .+"):
        check_template("{{ response }}" + part)


@pytest.mark.parametrize("part", HUGE)
def test_a_template_makes_nothing_huge(part: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        check_template("{{ response }}" + part)
    assert "reward.genrm.template" in str(caught.value) and HUGE[part] in str(caught.value)
    assert time.process_time() - started < 5


def test_what_a_template_needs_stays() -> None:
    check_template(
        "{{ '=' * 40 }} {{ response[:12] | upper }} {{ (3 * 4.5) | round }} {{ prompt | replace('a', 'b') }}"
    )
    check_template("{% for m in messages %}{{ loop.index }}: {{ m.role }} {{ m.content }}\n{% endfor %}{{ response }}")


def test_submit_refuses_it(pivot: Pivot) -> None:
    template = "{{ response }}{{ response.__class__.__mro__ }}"
    done = pivot("submit", "configs/emulated.yaml", f"reward.genrm.template='{template}'")
    assert done.code == 2 and "access to attribute '__class__' of 'str' object is unsafe" in done.err
