"""The term of a run's head only rises, whoever writes it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.agents.folders import Term, raise_term, term_in
from manyhands.core.scratch import scratch

TERMS = st.builds(Term, st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=20)
@given(st.lists(TERMS, max_size=8))
def test_the_highest_stands(wanted):
    with scratch("terms") as folder:
        assert term_in(folder / "ranks") == Term()
        for number, term in enumerate(wanted):
            assert raise_term(folder / "ranks", term) == max(wanted[: number + 1])
        assert term_in(folder / "ranks") == max([Term(), *wanted])


def test_what_is_no_term_is_as_none(tmp_path):
    for text in ("", "1", "1 2 3", "x y", "\xff"):
        (tmp_path / "term").write_text(text)
        assert term_in(tmp_path) == Term()
    assert raise_term(tmp_path, Term(1)) == Term(1)
    assert (tmp_path / "term").stat().st_mode & 0o777 == 0o600
