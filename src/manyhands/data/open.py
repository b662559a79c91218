"""Opens data sets by name or from Python objects."""

import contextlib
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.core.choices import load_choice
from manyhands.core.errors import UserError
from manyhands.core.user_code import is_object_reference
from manyhands.data.known import CHOICES, find_choice, known_set_at
from manyhands.data.options import DataOptions, data_folder
from manyhands.data.samples import splits_of_objects, splits_of_targets, splits_to_evaluate
from manyhands.data.splits import Source, Splits, map_labels_by_name, take
from manyhands.data.transforms import Pixels, spread

_AHEAD: dict[tuple[str, str], Splits] = {}  # results of `open_ahead`, by options and folder


def open_ahead(options: DataOptions) -> None:
    """Opens a data set, without downloads, for processes that are forked later. Ignores errors, which they report."""
    with contextlib.suppress(UserError):
        _AHEAD[_options_key(options)] = open_data(options.model_copy(update={"download": False}))


def _options_key(options: DataOptions) -> tuple[str, str]:
    return options.model_dump_json(exclude={"download"}), str(data_folder(options))


def open_data(options: DataOptions) -> Splits:
    """Opens the data set `options.name`, and downloads it if needed. Raises UserError if the data can't be used."""
    if ahead := _AHEAD.get(_options_key(options)):
        return ahead
    if known := known_set_at(options.name):
        options = options.model_copy(update={"name": known[0], "dir": known[1]})
    choice = load_choice(CHOICES, find_choice(options.name))
    return add_named_held_out(_limit_samples(choice.open(options.name, options), options), options)


def add_named_held_out(splits: Splits, options: DataOptions) -> Splits:
    """Adds the data set `options.held_out`, if set, for the final test. Raises UserError if its classes differ."""
    if not options.held_out:
        return splits
    own = options.model_copy(update={"name": options.held_out, "held_out": "", "train_samples": 0, "test_samples": 0})
    opened = open_unsplit_folder(own) if is_unsplit_folder(own.name) else open_data(own)
    source = map_labels_by_name(opened.test, opened.classes, splits.classes or opened.classes, options.held_out)
    return _add_held_out(splits, source, options.held_out)


def _add_held_out(splits: Splits, source: Source, place: str) -> Splits:
    text = f"{splits.description}; {len(source):,} more of {place} for the final test"
    return replace(splits, held_out=source, description=text)


def is_unsplit_folder(name: str) -> bool:
    """Returns True for a folder of class folders without splits. Raises UserError if the layout is ambiguous."""
    if is_object_reference(name) or known_set_at(name) or find_choice(name) != "user":
        return False
    from manyhands.data.layout import read_layout
    from manyhands.data.packed import is_pack, open_pack

    place = Path(name).expanduser()
    return not (open_pack(place).groups[0].word if is_pack(place) else read_layout(place).splits)


def open_unsplit_folder(options: DataOptions) -> Splits:
    """Opens an unsplit folder for evaluation. Both splits have all pictures, or `options.test_samples` of them."""
    from manyhands.data.gallery import open_folder

    opened = open_folder(Path(options.name).expanduser(), options, whole=True)
    test = _subset(opened.test, options.test_samples)
    return replace(opened, train=test, test=test)


def wrap_data_sets(train: Any, test: Any | None, options: DataOptions, held_out: Any | None = None) -> Splits:
    """Wraps the user's data sets, which are torch Datasets or other objects with __len__ and __getitem__.

    Without `test`, the fraction `options.validation` of the training samples is used for evaluation. `held_out` is
    evaluated once, at the end. Raises UserError if an object is not a data set, or has unusable samples.
    """
    splits = add_named_held_out(_limit_samples(splits_of_objects(train, test, options), options), options)
    if held_out is None:
        return splits
    place = "the held-out set"
    return _add_held_out(splits, splits_to_evaluate(held_out, splits.classes, place).test, place)


def wrap_targets(train: Any, options: DataOptions) -> Splits:
    """Wraps a data set whose targets are not classes, for a custom loss."""
    return _limit_samples(splits_of_targets(train), options)


def resolve_pixels(
    options: DataOptions, pixels: Pixels, *, model_channels: int | None = None, model_size: int | None = None
) -> Pixels:
    """Returns the preprocessing to use. Each setting is the option, else the model's, else that of `pixels`."""
    channels = options.channels or model_channels or pixels.channels
    size = options.image_size or model_size or pixels.size
    return replace(
        pixels,
        size=size,
        channels=channels,
        mean=_per_channel(options.mean or pixels.mean, channels, "data.mean"),
        std=_per_channel(options.std or pixels.std, channels, "data.std"),
        augment=pixels.augment if options.augment == "auto" else options.augment,
        shift=options.shift,
        reflects=options.shift_fill == "reflect",
        alternates=options.mirror == "alternate",
        resize=round(pixels.resize * size / pixels.size),
    )


def _limit_samples(splits: Splits, options: DataOptions) -> Splits:
    """Limits the splits to `train_samples` and `test_samples` random samples, the same in every run."""
    train = _subset(splits.train, options.train_samples)
    test = _subset(splits.test, options.test_samples)
    held_out = _subset(splits.held_out, options.test_samples) if splits.held_out is not None else None
    if train is splits.train and test is splits.test and held_out is splits.held_out:
        return splits
    text = f"{splits.description}, of which {len(train):,} + {len(test):,} are used"
    return replace(splits, train=train, test=test, description=text, held_out=held_out)


def _subset(source: Source, count: int) -> Source:
    return take(source, spread(count, len(source))) if 0 < count < len(source) else source


def _per_channel(values: tuple[float, ...], channels: int, where: str) -> tuple[float, ...]:
    """Returns one mean or deviation for each channel. Repeats a single value, and averages three for grey pictures."""
    if where == "data.std" and min(values) <= 0:
        raise UserError("a standard deviation must be above zero", where, (f"use positive values, not {list(values)}",))
    if len(values) == channels:
        return values
    if len(values) == 1:
        return values * channels
    if len(values) == 3 and channels == 1:
        return (statistics.fmean(values),)
    hints = (f"give 1 or {channels} values",)
    raise UserError(f"{len(values)} values were given for {channels} channels", where, hints)
