"""Pipeline parallelism: any split into stages trains like plain PyTorch, and a split is balanced, refused or described as it should be."""

import pytest
from test_parity import compare, recipe_for, reference, strategy, train_in_layout

CASES = [
    ("pp2 zero0", 2, "zero0", {"pp": 2}),
    ("pp2 zero1", 2, "zero1", {"pp": 2}),
    ("pp4 zero1", 4, "zero1", {"pp": 4}),
    ("pp2 tp2 zero0", 4, "zero0", {"pp": 2, "tp": 2}),
    ("pp2 tp2 zero1", 4, "zero1", {"pp": 2, "tp": 2}),
    ("pp2 dp2 zero1", 4, "zero1", {"pp": 2}),
    ("pp2 dp2 zero0", 4, "zero0", {"pp": 2}),
    ("pp2 tp2 dp2 zero1", 8, "zero1", {"pp": 2, "tp": 2}),
]


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize(("world", "file", "layout"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_stages_train_like_plain_pytorch(pools, tmp_path, model, world, file, layout):
    recipe = recipe_for(model, **layout)
    codes = pools.run(world, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run"))
    assert codes == [0] * world
    compare(tmp_path / "run", reference(model))
