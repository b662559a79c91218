"""A recipe that is asked for by its name."""

import json

import pytest

from tests.e2e.command import run


@pytest.mark.slow
def test_the_quick_recipe_of_cifar10_on_two_processes(here):
    data = "synthetic:300x3x32x32x10"
    few = ("--epochs", 1, "--batch", 100, "--set", "model.arguments={widths=[8,8,8]}", "--out", "r", "--json", "-q")
    ended = run("train", data, "--recipe", "cifar10-fast", "-n", 2, *few)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1])["status"] == "finished"
    job = (here / "r" / "job.toml").read_text()
    assert all(line in job for line in ('name = "quicknet"', "bias_rate = 64.0", 'mirror = "alternate"'))


def test_a_recipe_that_isnt_there_is_named_with_those_that_are():
    ended = run("train", "digits", "--recipe", "cifar10-fats", "--dry-run")
    assert ended.code == 2
    assert "there is no recipe cifar10-fats" in ended.err
    assert 'did you mean "cifar10-fast"?' in ended.err
