"""Loading a job: precedence, origins, and all mistakes at once."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cli.main import main
from manyhands.cluster.hosts.inventory import DEVICE_INDEX
from manyhands.config import recipes
from manyhands.config.job import Job
from manyhands.config.load import _ELSEWHERE, known_keys, load_job, meant_key, parse_value, read_toml
from manyhands.config.recipes import choose_recipe
from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError
from manyhands.core.records import FAILURE_FILE
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE
from manyhands.parallel.group.tunnel_ends import VARIABLE
from manyhands.worker.run_metadata import job_text


def _job_file(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("file", [None, 1, 2], ids=["no file", "file", "file too"])
@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_flags_win_over_environment_over_file_over_recipe(tmp_path, file, variable, flag):
    path = _job_file(tmp_path, f"[train]\nepochs = 10{file}\n") if file else None
    environment = {"MANYHANDS_TRAIN__EPOCHS": "7"} if variable else {}
    loaded = load_job({"train.epochs": 5 if flag else None}, file=path, environment=environment)
    wanted = 5 if flag else 7 if variable else int(f"10{file}") if file else 15
    assert loaded.job.train.epochs == wanted
    origin = loaded.origins["train.epochs"]
    assert origin.startswith("flag" if flag else "environment" if variable else str(path) if file else "recipe digits")


def test_all_mistakes_are_reported_at_once_with_their_locations(tmp_path):
    path = _job_file(tmp_path, '[train]\nepohcs = 3\nbatch = 0\noptimizer = "sdg"\n[nonsense]\na = 1\n')
    with pytest.raises(UserError) as caught:
        load_job({"train.lr": "fast", "train.channels_last": "maybe", "trian.seed": 3}, file=path, environment={})
    text = str(caught.value)
    for part in ("7 values", 'did you mean "train.epochs"?', "train.batch", 'did you mean "sgd"?', "nonsense.a",
                 "[flag --train.lr]", 'train.channels_last: should be true, false or "auto", found "maybe"',
                 "[flag --trian.seed]"):  # fmt: skip
        assert part in text
    assert text.count(str(path)) == 4
    assert caught.value.exit_code == 2
    with pytest.raises(UserError) as caught:
        load_job({"data.name": "digits", "train.lr": -3}, environment={})
    assert caught.value.where == "flag --train.lr"


def test_complete_job_survives_its_file(tmp_path):
    job = load_job({"model.arguments": {"width": 8}, "data.mean": [0.5], "train.norm_group": "global"}).job
    text = tomli_w.dumps(job.model_dump(mode="json"))
    assert load_job({}, file=_job_file(tmp_path, text), environment={}).job == job
    older = _job_file(tmp_path, '[train]\nepochs = 3\ncompile = "auto"\ncuda_graphs = "auto"\n')
    assert load_job({}, file=older, environment={}).job.train.compile is False
    with pytest.raises(UserError, match="no job file"):
        read_toml(tmp_path / "nothing.toml")


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()))
def test_values_of_flags_are_tomls(value):
    assert parse_value(str(value).lower() if isinstance(value, bool) else repr(value)) == value


def test_every_option_says_what_it_is():
    sections = {name: field.annotation.model_fields for name, field in Job.model_fields.items()}
    named = {key: key.partition(".") for key in known_keys()}
    unexplained = [key for key, (section, _, name) in named.items() if not sections[section][name].description]
    obvious = {"train.epochs", "train.optimizer", "train.weight_decay", "train.schedule", "train.label_smoothing",
               "train.precision", "train.channels_last", "train.seed"}  # fmt: skip
    assert set(unexplained) <= obvious


def test_a_variable_without_its_section_is_a_mistake_and_any_other_a_warning_but_for_our_own(capsys):
    meant = {"TRAIN_LR": "MANYHANDS_TRAIN__LR=3", "NAME": "MANYHANDS_DATA__NAME=3 or MANYHANDS_MODEL__NAME=3"}
    for name, variables in meant.items():
        with pytest.raises(UserError, match=f"no option matches variable MANYHANDS_{name}(.|\n)*{variables}"):
            load_job({}, environment={f"MANYHANDS_{name}": "3"})
    load_job({}, environment={"MANYHANDS_PORT": "tcp://10.0.0.1:29500", "MANYHANDS_DATA": "/d", "PATH": "/bin"})
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(words in said for words in ("ignoring MANYHANDS_PORT, which matches no option", "MANYHANDS_TRAIN__LR"))
    ours = (FAILURE_FILE, HEARTBEAT_FILE, VARIABLE, DEVICE_INDEX, "MANYHANDS_CACHE", "MANYHANDS_MIRROR")
    load_job({}, environment=dict.fromkeys(ours, "x"))
    assert not capsys.readouterr().err


VISION_TRANSFORMERS = ("vit_b_16", "vit_tiny", "torchvision:vit_l_32")


@pytest.mark.parametrize("recipe", sorted(file.stem for file in Path(recipes.__file__).parent.glob("*.toml")))
def test_every_recipe_is_a_valid_job_and_trains_a_vision_transformer_by_adamw(recipe):
    """Except what main.py does, which is SGD for all networks."""
    for network in (None, "mlp", "cnn", "resnet50", "vit_b_16", "convnext_tiny"):
        job = load_job({"data.name": recipe, "model.name": network}, environment={}).job
        assert job.model.name == network or network is None
    for network in VISION_TRANSFORMERS:
        _, chosen = choose_recipe(recipe, "digits", network)
        if recipe == "imagenet-main":
            assert (chosen["train.optimizer"], chosen["train.lr"]) == ("sgd", 0.1)
        else:
            assert chosen["train.optimizer"] == "adamw"
            assert chosen["train.lr"] <= 5e-4
            assert chosen.get("train.bias_rate", 1.0) == 1.0
    assert choose_recipe(recipe, "digits", "resnet18")[1].get("train.optimizer", "sgd") == "sgd"
    for network in ("swin_t", "convnext_tiny", "torchvision:swin_t", *VISION_TRANSFORMERS):
        assert choose_recipe("", "./pets", network)[1]["train.optimizer"] == "adamw"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train", "digits", "--optimizer", "adam"], "did you mean --train.optimizer?"),
        (["train", "digits", "--weigth-decay", "0.1"], "did you mean --train.weight_decay?"),
        (["train", "digits", "--learning-rate", "0.1"], "did you mean --lr?"),
        (["eval", "run", "--bs", "8"], "did you mean --train.batch?"),
        (["train", "--model", "mlp"], "manyhands train digits mlp"),
        (["logs", "run", "--folow"], "did you mean --follow?"),
        (["train", "data=mnist", "model=mlp", "epochs=3", "imgsz=32"],
         "write --data.name mnist --model.name mlp --train.epochs 3 --data.image_size 32"),
        (["val", "run"], "manyhands eval RUN"),
        (["infer", "x"], "manyhands predict"),
        (["help"], "manyhands --help"),
        (["doctor", "--set", "train.epoch=3"], "train.epochs"),
    ],
)  # fmt: skip
def test_the_words_of_other_programs_are_answered_with_ours(capsys, words, meant):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err


def test_every_name_from_elsewhere_stands_for_an_option_and_hides_none():
    keys = set(known_keys())
    assert set(_ELSEWHERE.values()) <= keys
    for word, key in _ELSEWHERE.items():
        assert meant_key(word) == meant_key(f"--{word}".lstrip("-").replace("_", "-")) == key
    for key in keys:
        assert meant_key(key.rpartition(".")[2]).rpartition(".")[2] == key.rpartition(".")[2]
    for word, meant in (("MNIST", "mnist"), ("FashionMNIST", "fashion-mnist"), ("CIFAR-10", "cifar10")):
        assert did_you_mean(word, ["mnist", "fashion-mnist", "cifar10", "digits"]) == f'did you mean "{meant}"?'


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[optimizer]\nlr = 0.1\n", 'did you mean "train.lr"?'),
        ('[train]\nepochs = 1\ndata = "mnist"\n', "write data = … above the first [section], or [data] with name"),
    ],
)
def test_keys_in_another_section_or_of_other_programs_are_answered_with_ours(tmp_path, text, hint):
    with pytest.raises(UserError) as caught:
        load_job({}, file=_job_file(tmp_path, text), environment={})
    assert any(hint in line for line in caught.value.hints)


def test_what_was_chosen_stands_behind_what_was_asked_for():
    job = Job()
    text = job_text(job, {"data.augment": "crop-flip", "data.mean": [0.13], "data.image_size": 28})
    assert 'augment = "auto"  # here: "crop-flip"' in text
    assert all(line in text for line in ("mean = []  # here: [0.13]", "image_size = 0  # here: 28"))
    assert Job.model_validate(tomllib.loads(text)) == job
