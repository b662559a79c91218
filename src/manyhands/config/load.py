"""Builds a Job from its sources, records the source of each value, and reports all invalid values at once.

`announce` prints the code files that a run folder or plan requests, before they run, because another user may own them.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from manyhands.checkpoint.trained import TrainedNetwork
from manyhands.config.job import OBJECT, OF_BUILT_IN_OPTIMIZERS, Job
from manyhands.config.recipes import choose_recipe
from manyhands.core import choices, files, user_code
from manyhands.core.errors import UserError, shortened
from manyhands.core.terminal import say
from manyhands.data.known import known_set_at

ENVIRONMENT_PREFIX = "MANYHANDS_"
# Variables that are not job values. Agents set the last four.
_RESERVED = ("DATA", "CACHE", "MIRROR", "TESTED_DEVICES", "DEVICE_INDEX", "FAILURE_FILE", "HEARTBEAT_FILE", "TUNNELS")
ENVIRONMENT_RESERVED = {ENVIRONMENT_PREFIX + name for name in _RESERVED}
# Options whose values are, or may be, paths.
NAMES_OF_FILES = {
    "data.name", "data.dir", "model.name", "model.weights", "parallel.plan", "cluster.hostfile", "cluster.file",
    "cluster.rank_table", "cluster.workdir", "checkpoint.resume", "checkpoint.pth_tar", "run.out",
}  # fmt: skip
Problem = tuple[str, str, str]  # message about one value, source of the value, hint
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4_095
Values = dict[str, Any]

# Sections with a short form: data = "mnist" means data.name = "mnist".
ONE_WORD = {"data": "name", "model": "name", "parallel": "mode", "sync": "method"}

# Names of options in timm, Hugging Face, Ultralytics and torchrun.
_NAMES_ELSEWHERE = {
    "data.name": "data dataset dataset_name",
    "data.dir": "data_path data_root",
    "data.image_size": "imgsz img_size input_size",
    "data.workers": "num_workers dataloader_num_workers",
    "model.name": "model arch model_name model_name_or_path network",
    "train.batch": "bs batch_size per_device_train_batch_size",
    "train.micro_batch": "accumulate grad_accum_steps gradient_accumulation_steps",
    "train.epochs": "num_epochs num_train_epochs max_epochs",
    "train.lr": "lr0 learning_rate",
    "train.optimizer": "opt optim",
    "train.schedule": "sched scheduler lr_scheduler lr_scheduler_type",
    "train.label_smoothing": "smoothing label_smoothing_factor",
    "train.clip": "clip_grad max_grad_norm",
    "train.precision": "amp half fp16 bf16",
    "cluster.processes": "nproc_per_node num_processes gpus devices",
    "checkpoint.resume": "resume_from_checkpoint",
    "run.out": "output output_dir project",
}
_ELSEWHERE = {word: key for key, words in _NAMES_ELSEWHERE.items() for word in words.split()}


@dataclass(frozen=True)
class LoadedJob:
    """A job and the source of each value."""

    job: Job  # validated
    origins: dict[str, str]  # source by dotted key, for values that are not plain defaults


def load_job(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    job: Job | None = None,
    environment: Mapping[str, str] | None = None,
    recipe: str = "",
) -> LoadedJob:
    """Builds the job. Raises a UserError that lists all invalid values.

    Args:
        flags: values from the command line or from Python, by dotted key; None values are skipped.
        file: a job.toml.
        job: a Job from Python in place of a job.toml; only values that were set explicitly count.
        environment: variables MANYHANDS_SECTION__KEY; None: this process's environment.
        recipe: name of the recipe; empty: the recipe of the data set.
    """
    layers = [
        (written_values(file) if file else {}, f"{file}" if file else ""),
        (flatten(job.model_dump(exclude_unset=True)) if job else {}, "job"),
        (_from_environment(os.environ if environment is None else environment), "environment"),
        ({key: value for key, value in flags.items() if value is not None}, "flag"),
    ]
    values, origins = dict[str, Any](), dict[str, str]()
    for layer, name in layers:
        _apply_layer(values, origins, layer, name)
    name = str(values.get("data.name", ""))
    if not _why_unusable("data.name", name) and (known := known_set_at(name)):  # a path to a known set's files
        values["data.name"], values["data.dir"] = known
        origins["data.dir"] = origins["data.name"]
    model = str(values.get("model.name", ""))
    recipe, merged = choose_recipe(recipe, str(values.get("data.name", "digits")), model)
    merged_origins = dict.fromkeys(merged, f"recipe {recipe}")
    if values.get("train.loss", "cross-entropy") != "cross-entropy":
        merged.pop("train.label_smoothing", None)  # it applies to the recipe's loss only
    if _is_custom(values.get("train.optimizer")):
        _drop_optimizer_options(merged, origins)
    if _is_custom(values.get("train.schedule")):
        merged.pop("train.warmup_epochs", None)
    _apply_layer(merged, merged_origins, values, "")
    merged_origins.update(origins)
    checked = _validated_job(merged, merged_origins)
    checked.cluster.mark_flags(key.partition(".")[2] for key, origin in origins.items() if origin == "flag")
    return LoadedJob(checked, merged_origins)


def _is_custom(value: Any) -> bool:
    return isinstance(value, str) and (value == OBJECT or user_code.is_object_reference(value))


def _drop_optimizer_options(recipe: Values, origins: dict[str, str]) -> None:
    """Removes SGD and AdamW options from `recipe`, for a custom optimizer. Raises UserError if the user has set one."""
    for name in OF_BUILT_IN_OPTIMIZERS:
        recipe.pop(f"train.{name}", None)
        origin = origins.get(f"train.{name}", "")
        if origin in {"flag", "job"} or origin.startswith("environment"):
            what = f"train.{name} applies to sgd and adamw, not to an optimizer of your own"
            where = f"flag --train.{name}" if origin == "flag" else origin
            raise UserError(what, where, (f"remove train.{name}", f"set {name} in the code that creates the optimizer"))


def load_job_argument(base: Job | str | Path | None, flags: Mapping[str, Any]) -> LoadedJob:
    """Builds the job from a Python function's `job` argument; `flags` override it. Raises UserError if invalid."""
    if isinstance(base, str | Path):
        return load_job(flags, file=Path(base).expanduser())
    given: Any = base
    if given is not None and not isinstance(given, Job):
        hints = ("pass job=manyhands.Job(train=manyhands.TrainOptions(epochs=3))", 'or job="job.toml"')
        raise UserError(f"job is a {type(given).__name__}, neither a Job nor the path of a job.toml", "job", hints)
    return load_job(flags, job=base)


def written_values(file: Path) -> Values:
    """Reads a job.toml's values by dotted key, unvalidated. Raises UserError if the file is missing or not TOML."""
    values: Values = {}
    _apply_layer(values, {}, flatten(read_toml(file)), "")
    values.pop("train.cuda_graphs", None)  # an option of older versions, like "auto" for train.compile
    if values.get("train.compile") == "auto":
        values["train.compile"] = False
    return values


def _apply_layer(values: Values, origins: dict[str, str], layer: Values, name: str) -> None:
    """Overwrites `values` by those of `layer`, and their `origins` by the layer's name. Expands data = "mnist"."""
    for given, value in layer.items():
        key = f"{given}.{ONE_WORD[given]}" if given in ONE_WORD and not isinstance(value, dict) else given
        values[key] = value
        origins[key] = f"{name} {_variable_name(key)}" if name == "environment" else name


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Values:
    """Flattens sections to dotted keys; a table inside a section stays a dict."""
    flat: Values = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and not prefix:
            flat.update(flatten(cast(Values, value), f"{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _variable_name(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")


def _from_environment(environment: Mapping[str, str]) -> Values:
    found: Values = {}
    for name, text in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name in ENVIRONMENT_RESERVED:
            continue
        word = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if "__" in word:
            found[word.replace("__", ".", 1)] = parse_value(text)
        elif meant := [key for key in known_keys() if word in (key.partition(".")[2], key.replace(".", "_"))]:
            hint = " or ".join(f"{_variable_name(key)}={text}" for key in meant)
            raise UserError(f"no option matches variable {name}", "environment", (f"write {hint}", f"or unset {name}"))
        else:
            say(f"ignoring {name}, which matches no option; options are written like {_variable_name('train.lr')}")
    return found


def parse_value(text: str) -> Any:
    """Parses the value of a flag or environment variable as TOML; returns text that isn't TOML unchanged."""
    try:
        return files.parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


@functools.cache
def known_keys() -> Mapping[str, Any]:
    """Returns a dict from the dotted key of each option to its declared type."""
    sections = {name: cast(type[BaseModel], field.annotation).model_fields for name, field in Job.model_fields.items()}
    return {f"{name}.{key}": field.annotation for name, fields in sections.items() for key, field in fields.items()}


def _validated_job(values: Values, origins: dict[str, str]) -> Job:
    keys = known_keys()
    # Names the flag, such as --train.lr.
    origins = {key: f"flag --{key}" if origin == "flag" else origin for key, origin in origins.items()}
    problems = [_unknown_key_problem(key, origins) for key in values if key not in keys]
    unusable = {key: why for key, value in values.items() if (why := _why_unusable(key, value))}
    problems += [(f"{key} {why}", origins.get(key, "job"), "") for key, why in unusable.items()]
    tree: dict[str, dict[str, Any]] = {}
    for key in filter(values.__contains__, keys):
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = values[key]
    try:
        job = Job.model_validate(tree)
        if not problems:
            return job
    except ValidationError as error:
        problems += _list_problems(error, origins)
    if len(problems) == 1:
        what, where, hints = problems[0]
        raise UserError(what, where, tuple(filter(None, (hints,))))
    lines = tuple(f"{what}   [{where}]" + (f"   {hints}" if hints else "") for what, where, hints in problems)
    raise UserError(f"{len(problems)} values of the job are wrong", hints=lines)


def meant_key(word: str) -> str:
    """Returns the option that a misspelled or incomplete key, or another tool's option, probably means, or ""."""
    name = word.replace("-", "_").lower()
    last = name.rpartition(".")[2]
    keys = [*known_keys()]
    named = _ELSEWHERE | {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = last if last in named else choices.most_similar_word(name, keys if "." in name else named)
    return named.get(near, near)


def _unknown_key_problem(key: str, origins: dict[str, str]) -> Problem:
    name, meant = key.rpartition(".")[2], meant_key(key)
    hint = f'did you mean "{meant}"?' if meant else "list all options with --show-config"
    if name in ONE_WORD and meant == f"{name}.{ONE_WORD[name]}":
        hint = f"write {name} = … above the first [section], or [{name}] with {ONE_WORD[name]} = … below it"
    return f"there is no option {shortened(key)}", origins.get(key, ""), hint


def _why_unusable(key: str, value: Any) -> str:
    """Returns the reason why a value can't be used as a path or written to job.toml; "" if it can."""
    words = cast(list[Any], value) if isinstance(value, list | tuple) else [value]
    texts = [word for word in words if isinstance(word, str)]
    if any("\0" in text for text in texts):
        return "contains a NUL character"
    if any(re.search("[\ud800-\udfff]", text) for text in texts):
        return "is not valid UTF-8"
    if key in NAMES_OF_FILES and isinstance(value, str):
        parts = [len(part.encode()) for part in value.split("/")]
        if max(parts) > _MOST_NAME_BYTES or sum(parts) + len(parts) > _MOST_PATH_BYTES:
            return f"is too long for a file name: {shortened(value)}"
    return ""


def _list_problems(error: ValidationError, origins: dict[str, str]) -> list[Problem]:
    """Converts a ValidationError to one problem per option. pydantic reports one for each type of a union."""
    problems: dict[Any, Problem] = {}
    for number, item in enumerate(error.errors()):
        # The option's key; empty for an error that concerns several sections.
        key = ".".join(part for part in item["loc"][:2] if isinstance(part, str))
        kinds, words = _describe_types(known_keys().get(key))
        kinds = [] if item["type"] == "value_error" else kinds
        given = item.get("input")
        message = str(item["msg"]).removeprefix("Value error, ")
        if kinds:
            message = f"should be {', '.join(kinds[:-1])} or {kinds[-1]}"
        found = "" if isinstance(given, dict) else f", found {shortened(json.dumps(given, default=str))}"
        what = f"{key}{key and ': '}{message[0].lower()}{message[1:]}{found}"
        hint = choices.did_you_mean(given, words) if isinstance(given, str) else ""
        problems.setdefault(key if kinds else number, (what, origins.get(key, "job"), hint))
    return list(problems.values())


def is_switch(key: str) -> bool:
    """Returns True for the key of a boolean option; a key without a section is looked up in train."""
    return known_keys().get(key if "." in key else f"train.{key}") is bool


def _describe_types(declared: Any) -> tuple[list[str], list[str]]:
    """Returns ([description of each type of a union], [all literal strings]) of a declared type."""
    several = get_origin(declared) in (Union, UnionType)
    names = {bool: ["true", "false"], int: ["a whole number"], tuple[int, ...]: ["a list of whole numbers"]}
    kinds, words = list[str](), list[str]()
    for one in get_args(declared) if several else (declared,):
        values = get_args(one) if get_origin(one) is Literal else ()
        kinds += names.get(one) or map(json.dumps, values)
        words += [word for word in values if isinstance(word, str)]
    return kinds if several else [], words


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a UTF-8 TOML file, with or without a byte-order mark. Raises UserError if it is missing or invalid."""
    try:
        text = files.decode_text(files.read_bytes(path, files.MOST_TOML_BYTES, pipes=True))
    except FileNotFoundError:
        raise UserError(f"there is no job file {path}", hints=("name an existing job.toml",)) from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", str(path)) from None
    except ValueError as error:
        hints = ("name a job.toml, which is a small text file",)
        if "UTF-8" in str(error):
            encoding = "GBK" if "GBK" in str(error) else "ITS_ENCODING"
            convert = f"or run iconv -f {encoding} -t UTF-8 {path.name} > job-utf8.toml"
            hints = ("save the file as UTF-8 in your editor", convert)
        raise UserError(f"{path} can't be read: {error}", str(path), hints) from None
    try:
        return files.parse_toml(text)
    except ValueError as error:
        hints = ('write values as key = "text" or key = 3',)
        raise _section_given_twice(text, path) or UserError(f"{path} is not TOML: {error}", str(path), hints) from None


def _section_given_twice(text: str, path: Path) -> UserError | None:
    """Returns the error for a section that is both a value and a table, which TOML forbids; None if there is none."""
    for section, main in ONE_WORD.items():
        word = re.search(rf"^[ \t]*{section}[ \t]*=[ \t]*(?P<value>[^\s{{][^\n#]*)", text, re.MULTILINE)
        table = re.search(rf"^[ \t]*(\[[ \t]*{section}[ \t]*[\].]|{section}[ \t]*\.)", text, re.MULTILINE)
        if word and table:
            lines = [text.count("\n", 0, found.start()) + 1 for found in (word, table)]
            value = word["value"].strip()[:80]
            what = f"{section} is a name on line {lines[0]} and a table on line {lines[1]}; TOML allows only one"
            move = f"write the name into the table: [{section}], and below it {main} = {value}"
            return UserError(what, f"{path}, line {lines[0]}", (move, f"remove line {lines[0]}"))
    return None


def announce(
    words: Iterable[str], requested_by: Path, record: TrainedNetwork | None, instead: str, *, compared: bool = True
) -> None:
    """Prints the code files that a run is about to execute and, with `compared`, whether they changed since training.

    `words`: option values, some of which name code. `requested_by`: the folder or file with these values. `record`: has
    digests of the code at training. `instead`: a hint, with {} for the code. Raises UserError for other users' code.
    """
    known = record.code if record else {}
    for word in dict.fromkeys(words):
        file = user_code.code_file(word)
        if file is None or not file.is_file():
            continue
        for place in (requested_by, file):
            refuse_other_users(word, place, requested_by, instead.format(word))
        digests = user_code.code_digests([word])
        unchanged = word in digests and all(known.get(name, digest) == digest for name, digest in digests.items())
        trained = "; unchanged since training" if unchanged else "; CHANGED since training"
        if word not in known:
            trained = "; the version used in training is unknown"
        say(f"running code from {file}, as {requested_by} requests{trained if compared else ''}")


def refuse_other_users(word: str, place: Path, requested_by: Path, instead: str) -> None:
    """Raises UserError unless this user or root owns the file or folder `place`, which is needed to run `word`."""
    if place.exists() and (owner := place.stat().st_uid) not in {0, os.geteuid()}:
        what = f"{requested_by} requests to run {word}, but {place} belongs to another user (uid {owner})"
        raise UserError(what, str(place), (f"review {word}, then name it explicitly: {instead}",))
