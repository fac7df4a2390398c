"""Random trees: every built-in container, keys of every kind with any characters."""

from collections import OrderedDict, defaultdict

from hypothesis import strategies as st

any_text = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates as well
plain_keys = st.one_of(
    any_text,
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=4),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
)
dict_keys = st.recursive(plain_keys, lambda keys: st.lists(keys, max_size=3).map(tuple), max_leaves=4)


def containers(children):
    entries = st.dictionaries(dict_keys, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        entries,
        entries.map(OrderedDict),
        entries.map(lambda made: defaultdict(list, made)),
    )


trees = st.recursive(st.one_of(st.integers(), st.none()), containers, max_leaves=30)
