import random

from environments.domains.mutations import catalogue, hidden_arguments, mutants, noticed, source_of
from environments.domains.repair_functions import HELDOUT, REPAIRABLE


def test_the_catalogue_fits_the_functions() -> None:
    assert set(catalogue()) == set(REPAIRABLE)
    for name, posed in catalogue().items():
        assert set(posed) <= set(mutants(name)), f"{name}: run python -m environments.domains.mutations"
        assert posed, name
        for mutant in posed:
            assert mutant.apply(source_of(name)) != source_of(name)


def test_a_sample_of_the_catalogue_is_noticed_by_visible_and_hidden_cases() -> None:
    rng = random.Random(0)
    for name in rng.sample(sorted(catalogue()), 10):
        assert noticed(rng.choice(catalogue()[name]))


def test_equal_functions_are_not_noticed() -> None:
    mutant = catalogue()["clamp"][0]
    same = mutant.__class__(function="clamp", line=mutant.line, column=mutant.column, before=mutant.before, after=mutant.before)
    assert not noticed(same)


def test_hidden_inputs_go_beyond_the_visible_ones() -> None:
    for name, entry in REPAIRABLE.items():
        assert sum(arguments not in entry.visible for arguments in hidden_arguments(name)) >= 8, name
    assert set(REPAIRABLE) > HELDOUT
