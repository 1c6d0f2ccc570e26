"""The first of the ranks' values that are not finite."""

from dataclasses import replace

from recipekit.watch.blame import BadValue, first_of_ranks

OUTPUT = BadValue(1, "node1", "cuda:1", "layers.3", "output", False, 1, 0, 26)
GRADIENT = replace(OUTPUT, what="gradient", backward=True, module="layers.3.weight")


def test_no_value_is_the_first_of_none():
    assert first_of_ranks([]) is None


def test_of_tensor_parallel_ranks_the_earliest_call_is_first():
    later = replace(OUTPUT, rank=0, order=33, module="layers.4")
    assert first_of_ranks([later, OUTPUT]) == OUTPUT


def test_an_output_comes_before_a_gradient():
    early = replace(GRADIENT, rank=0, order=2)
    assert first_of_ranks([early, OUTPUT]) == OUTPUT


def test_outputs_go_up_the_stages_and_gradients_come_down():
    above = replace(OUTPUT, rank=2, stage=1, order=1)
    assert first_of_ranks([above, OUTPUT]) == OUTPUT
    above = replace(GRADIENT, rank=2, stage=1, order=99)
    assert first_of_ranks([GRADIENT, above]) == above


def test_the_text_names_everything():
    assert str(GRADIENT) == (
        "the gradient of layers.3.weight (micro-batch 1, backward pass) on rank 1 (node1, cuda:1)"
    )
