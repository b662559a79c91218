"""Picture files: what is decoded, what is refused, and that pixels are the same by either decoder."""

import contextlib
import importlib.util
import io
import logging
import resource
import struct
import sys
import zlib
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.data import pictures
from manyhands.data.decode import CorruptImageError, decode, read_content, read_header
from manyhands.data.pictures import read_picture
from manyhands.data.splits import ImageFiles, Splits
from manyhands.data.transforms import DRAW_MIRROR, Pixels, SampleRng, crop_box
from manyhands.train import data_setup
from manyhands.train.data_setup import record_data_notes

RAMP = numpy.arange(256, dtype=numpy.uint8).reshape(16, 16)
COLORS = numpy.stack([RAMP, RAMP.T, 255 - RAMP], axis=2)


def save(path, image, **options):
    image.save(path, **options)
    return str(path)


def near(image, wanted, level=1):
    found = numpy.asarray(image).astype(int)
    assert found.shape == wanted.shape
    assert numpy.abs(found - wanted.astype(int)).max() <= level


def grey_in_rgb(values):
    return numpy.repeat(values[:, :, None], 3, axis=2)


def tiff(path, channels, *, planes_apart):
    """A 16-bit TIFF of many channels, as satellite pictures are; deflated."""
    pixels = zlib.compress(numpy.arange(8 * 8 * channels, dtype=numpy.uint16).tobytes())
    tags = {256: 8, 257: 8, 258: 16, 259: 8, 262: 1, 277: channels, 278: 8, 284: 2 if planes_apart else 1, 339: 1}
    entries = [struct.pack("<HHIHxx", tag, 3, 1, value) for tag, value in tags.items()]
    entries += [struct.pack("<HHII", tag, 4, 1, value) for tag, value in {273: 8, 279: len(pixels)}.items()]
    head = struct.pack("<2sHI", b"II", 42, 8 + len(pixels))
    path.write_bytes(head + pixels + struct.pack("<H", len(entries)) + b"".join(sorted(entries)) + bytes(4))
    return str(path)


@pytest.mark.parametrize("planes_apart", [False, True])
def test_a_tiff_of_many_channels_is_one_error_without_other_lines(tmp_path, capfd, monkeypatch, planes_apart):
    """Also where Pillow alone would give the first channel as a grey picture."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for read in (read_header, lambda path, content: decode(path, 3, content)):
        with pytest.raises(CorruptImageError, match="a TIFF file needs 1, 3 or 4 channels"):
            read("x.tif", read_content(tiff(tmp_path / "x.tif", 13, planes_apart=planes_apart)))
    assert capfd.readouterr().err == ""
    grey = decode("y.tif", 1, read_content(tiff(tmp_path / "y.tif", 1, planes_apart=planes_apart)))
    near(grey, (numpy.arange(64).reshape(8, 8) / 257).round())


def with_alpha(colors, alpha, mode="RGBA"):
    image = Image.fromarray(colors).convert(mode)
    image.putalpha(Image.fromarray(alpha))
    return image


def in_palette(**options):
    image = Image.fromarray(RAMP)
    image.putpalette([value for level in range(256) for value in (level, 255 - level, 7)])
    return image, options


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return Image.fromarray(COLORS[:8]), {"exif": exif}


RGB, GREY, WIDE = Image.fromarray(COLORS), Image.fromarray(RAMP), RAMP.astype(numpy.uint16) * 257
PALETTE = numpy.stack([RAMP, 255 - RAMP, RAMP * 0 + 7], axis=2)
FRAMES = [Image.fromarray(numpy.full((4, 4), level, numpy.uint8)) for level in (40, 200)]


@pytest.mark.parametrize(
    ("image", "suffix", "wanted", "level"),
    [
        (RGB, "png", COLORS, 0),
        (RGB, "png", numpy.asarray(RGB.convert("L")), 0),
        (GREY, "png", RAMP, 0),
        (GREY, "png", grey_in_rgb(RAMP), 0),
        (GREY.convert("1"), "png", numpy.asarray(GREY.convert("1")) * 255, 0),
        (RGB.convert("CMYK"), "tif", COLORS, 2),
        (GREY.convert("LA"), "png", grey_in_rgb(RAMP), 0),
        # Transparency is dropped where the colors show the content.
        (with_alpha(COLORS, RAMP), "png", COLORS, 0),
        (with_alpha(COLORS * 0 + 9, RAMP * 0 + 200), "png", COLORS * 0 + 9, 0),
        (in_palette(), "png", PALETTE, 0),
        (in_palette(transparency=3), "png", PALETTE, 0),
        (in_palette(transparency=bytes(range(256))), "png", PALETTE, 0),
        # Wide pixels are scaled and not cut off.
        (Image.fromarray(WIDE), "png", grey_in_rgb(RAMP), 1),
        (Image.fromarray(WIDE // 4), "png", RAMP // 4, 1),
        (Image.fromarray(RAMP.astype(">u2") * 257), "tif", RAMP, 1),
        # Of numbers without a range, the least is black and the largest white.
        (Image.fromarray(RAMP.astype(numpy.float32) / 255), "tif", RAMP, 1),
        (Image.fromarray(RAMP.astype(numpy.int32) * 257), "tif", RAMP, 1),
        (Image.fromarray(RAMP.astype(numpy.float32) * 1000 - 5000), "tif", RAMP, 1),
        (Image.fromarray(RAMP.astype(numpy.int32) * -1), "tif", 255 - RAMP, 1),
        (Image.fromarray(numpy.full((4, 4), numpy.nan, numpy.float32)), "tif", numpy.zeros((4, 4)), 1),
        # Cameras that were turned, an EXIF that is broken, an animation's first frame.
        (turned(3), "png", COLORS[:8][::-1, ::-1], 0),
        (turned(6), "png", numpy.rot90(COLORS[:8], -1), 0),
        (turned(7), "png", numpy.rot90(COLORS[:8].transpose(1, 0, 2), 2), 0),
        ((RGB, {"exif": b"Exif\0\0II*\0" + b"\xff" * 20}), "png", COLORS, 0),
        ((FRAMES[0], {"save_all": True, "append_images": FRAMES[1:]}), "gif", numpy.full((4, 4), 40), 0),
    ],
)
def test_pictures_of_all_modes_are_decoded(tmp_path, image, suffix, wanted, level):
    image, options = image if isinstance(image, tuple) else (image, {})
    content = read_content(save(tmp_path / f"x.{suffix}", image, **options))
    near(decode("x", 3 if wanted.ndim == 3 else 1, content), wanted, level)


@pytest.mark.parametrize("color", [0, 40, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_shape_in_the_alpha_channel_alone_is_drawn(tmp_path, color, mode, channels):
    if mode == "P":
        image = Image.fromarray(RAMP)
        image.putpalette([color] * 768)
        path = save(tmp_path / "a.png", image, transparency=bytes(range(256)))
    else:
        path = save(tmp_path / "a.png", with_alpha(RAMP * 0 + color, RAMP, mode))
    ground = 0 if color > 127 else 255
    wanted = ground + (color - ground) * (RAMP / 255)
    near(decode(path, channels, read_content(path)), wanted if channels == 1 else grey_in_rgb(wanted))


def header(side):
    """Of a PNG, and no more."""
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = b"\x89PNG\r\n\x1a\n", struct.pack(">I", 13), head, struct.pack(">I", zlib.crc32(head)), b"\0\0\0\0IDAT"
    return b"".join(parts) + b"\x35\xaf\x06\x1e"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "the file is empty"),
        (b"no picture", "Pillow doesn't recognize the format"),
        (header(60_000), "3600 megapixels exceed the limit of 89"),
        (header(13_300), "177 megapixels exceed the limit of 89"),  # where Pillow only warns
        (None, "the file no longer exists"),
        ("a folder", "the path is a folder"),
    ],
)
@pytest.mark.parametrize("read", [read_header, lambda path, content: decode(path, 3, content)])
def test_what_is_no_picture_is_named(tmp_path, read, content, word):
    path = tmp_path / "x.png"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(CorruptImageError, match=word) as caught:
        read(str(path), read_content(str(path)))
    assert caught.value.where == str(path)
    assert any("--data.skip-corrupt" in line for line in caught.value.hints)


@pytest.mark.parametrize("kind", ["jpeg", "png", "bmp", "gif", "webp", "tiff", "ppm"])
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_a_picture_that_is_cut_short_is_corrupt_and_changed_bytes_never_end_in_another_error(kind):
    buffer = io.BytesIO()
    noise = numpy.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(buffer, kind)
    whole = buffer.getvalue()
    for length in range(0, len(whole) * 9 // 10, 61):
        with pytest.raises(CorruptImageError):
            decode("x", 3, whole[:length])
    for place in [*range(min(80, len(whole))), *range(80, len(whole), 97)]:
        with contextlib.suppress(CorruptImageError):
            assert decode("x", 3, whole[:place] + bytes([whole[place] ^ 0x5F]) + whole[place + 1 :]).mode == "RGB"


KINDS = ["RGB", "L", "CMYK", "progressive", "keep_rgb", "turned", "png"]


def wanted(size=24, channels=3, augment="resized-crop-flip"):
    return Pixels(size, channels, (0.5,) * channels, (0.2,) * channels, augment)


def smooth(width, height, seed=0):
    """A picture with something on it: noise of a few pixels made larger."""
    values = numpy.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def stored(kind, width, height, seed=0, **options):
    picture, options = smooth(width, height, seed), {"quality": 85} | options
    if kind == "turned":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    picture = picture.convert(kind) if kind in ("L", "CMYK") else picture
    content = io.BytesIO()
    options |= {"progressive": kind == "progressive"}
    options |= {"keep_rgb": True, "subsampling": 0} if kind == "keep_rgb" else {}
    picture.save(content, "PNG" if kind == "png" else "JPEG", **options)
    return content.getvalue()


def by_pillow(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "decode_jpeg", None)
        return read_picture(*arguments)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.tuples(st.integers(1, 130), st.integers(1, 130)),
    st.fixed_dictionaries(
        {
            "quality": st.sampled_from([5, 30, 85, 95]),
            "subsampling": st.sampled_from([0, 1, 2]),
            "restart_marker_blocks": st.sampled_from([0, 3]),
        }
    ),
    st.sampled_from([1, 3]),
    st.sampled_from(["none", "crop", "crop-flip", "resized-crop-flip"]),
    st.one_of(st.none(), st.integers(0, 99)),
)
def test_both_decoders_give_the_same_bits(kind, size, options, channels, augment, sample):
    pixels, draws = wanted(channels=channels, augment=augment), None if sample is None else SampleRng(7, sample)
    arguments = ("a.jpg", pixels, draws, stored(kind, *size, **options))
    found = read_picture(*arguments)
    assert (found.shape, found.dtype) == ((channels, 24, 24), torch.uint8)
    assert torch.equal(found, by_pillow(*arguments))


def test_both_decoders_give_the_same_bits_of_imagenets_pictures(real_data):
    """For 24 pixels libjpeg scales nearly all of them down."""
    paths = sorted(real_data("imagenet-sample").rglob("*.JPEG"))
    assert len(paths) == 100
    for number, path in enumerate(paths):
        for draws in (None, SampleRng(7, number)):
            arguments = (str(path), wanted(24 if number % 8 else 224), draws, path.read_bytes())
            assert torch.equal(read_picture(*arguments), by_pillow(*arguments)), path


def test_simplejpeg_decodes_plain_jpegs_and_without_it_the_run_says_so(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "decode", None)
        for kind in ("RGB", "L", "progressive", "keep_rgb"):
            read_picture("a.jpg", wanted(), None, stored(kind, 60, 40))
    said, files = [], ImageFiles(None, torch.zeros(1, dtype=torch.int64))
    splits, journal = (
        Splits(files, files, ("a",), "", wanted()),
        SimpleNamespace(event=lambda _, text: said.append(text)),
    )
    record_data_notes(splits, journal)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)  # importing it fails
    spec = importlib.util.spec_from_file_location("pictures_again", pictures.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    draws, content = SampleRng(7, 3), stored("RGB", 60, 40)
    assert torch.equal(*(way("a.jpg", wanted(), draws, content) for way in (again.read_picture, read_picture)))
    monkeypatch.setattr(data_setup, "decode_jpeg", again.decode_jpeg)
    record_data_notes(splits, journal)
    assert said == ["JPEGs are decoded with Pillow; simplejpeg is faster (do: pip install simplejpeg)"]


@pytest.mark.parametrize("kind", ["RGB", "turned"])
@pytest.mark.parametrize("sample", [None, 1, 2])
def test_a_much_larger_jpeg_looks_as_if_decoded_whole(monkeypatch, kind, sample):
    content, draws = stored(kind, 900, 700), None if sample is None else SampleRng(7, sample)
    found = read_picture("a.jpg", wanted(), draws, content)
    assert torch.equal(found, by_pillow("a.jpg", wanted(), draws, content))
    monkeypatch.setattr(pictures, "_scale", lambda *_: 1)
    whole = read_picture("a.jpg", wanted(), draws, content)
    # Of 255. A drawn box is rounded to the smaller picture's pixels, half of one of the result's; other boxes give 40
    assert (found.int() - whole.int()).abs().float().mean() < (3 if sample is None else 12)


@pytest.mark.parametrize("sample", range(6))
def test_crops_are_those_of_pillow_to_a_level(real_data, sample):
    """What the usual recipe does: cut, then resize with Pillow."""
    path = sorted(real_data("imagenet-sample").rglob("*.JPEG"))[sample]
    draws = SampleRng(5, sample)
    found = read_picture(str(path), wanted(224), draws, path.read_bytes())
    with Image.open(path) as image:
        image = image.convert("RGB")
        box = crop_box(image.width, image.height, draws)
        image = image.crop(box).resize((224, 224), Image.Resampling.BILINEAR)
    if draws.below(DRAW_MIRROR, 2):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    expected = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    assert (found.int() - expected.int()).abs().max() <= 1


def test_a_very_long_picture_takes_no_gigabytes_and_its_ends_change_nothing(monkeypatch):
    for size in ((60_000, 1), (1, 60_000)):
        read_picture("a.png", wanted(224, augment="none"), None, stored("png", *size))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KB; resized as a whole it is 9 GB
    contents = [stored("png", *size) for size in ((900, 7), (30, 501))]
    found = [read_picture("a.png", wanted(augment="none"), None, content) for content in contents]
    monkeypatch.setattr(pictures, "_MOST_TIMES", 1000)
    for one, content in zip(found, contents, strict=True):
        assert (one.int() - read_picture("a.png", wanted(augment="none"), None, content).int()).abs().max() <= 4
