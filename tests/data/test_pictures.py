"""Picture files: what is decoded, what is refused, and that pixels are the same by either decoder."""

import contextlib
import io
import logging
import resource
import struct
import subprocess
import sys
import textwrap
import zlib

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.core.errors import UserError
from manyhands.data import pictures
from manyhands.data.decode import CorruptImageError, decode, probe
from manyhands.data.pictures import read_picture
from manyhands.data.transforms import DRAW_MIRROR, Pixels, SampleRng, crop_box

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
    for read in (probe, lambda path: decode(path, 3)):
        with pytest.raises(CorruptImageError, match="a TIFF file needs 1, 3 or 4 channels"):
            read(tiff(tmp_path / "x.tif", 13, planes_apart=planes_apart))
    assert capfd.readouterr().err == ""
    grey = decode(tiff(tmp_path / "y.tif", 1, planes_apart=planes_apart), 1)
    near(grey, (numpy.arange(64).reshape(8, 8) / 257).round())


def test_plain_modes(tmp_path):
    rgb = Image.fromarray(COLORS)
    near(decode(save(tmp_path / "rgb.png", rgb), 3), COLORS, 0)
    near(decode(save(tmp_path / "l.png", Image.fromarray(RAMP)), 3), grey_in_rgb(RAMP), 0)
    near(decode(save(tmp_path / "l.png", Image.fromarray(RAMP)), 1), RAMP, 0)
    near(decode(save(tmp_path / "rgb.png", rgb), 1), numpy.asarray(rgb.convert("L")), 0)
    near(decode(save(tmp_path / "rgba.png", rgb.convert("RGBA")), 3), COLORS, 0)
    near(decode(save(tmp_path / "la.png", Image.fromarray(RAMP).convert("LA")), 3), grey_in_rgb(RAMP), 0)
    bits = Image.fromarray(RAMP).convert("1")
    near(decode(save(tmp_path / "1.png", bits), 3), grey_in_rgb(numpy.asarray(bits) * 255), 0)
    near(decode(save(tmp_path / "cmyk.tif", rgb.convert("CMYK")), 3), COLORS, 2)
    assert decode(save(tmp_path / "cmyk.jpg", rgb.convert("CMYK")), 3).mode == "RGB"


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(256))])
def test_palettes(tmp_path, transparency):
    palette = Image.fromarray(RAMP)
    palette.putpalette([value for level in range(256) for value in (level, 255 - level, 7)])
    options = {} if transparency is None else {"transparency": transparency}
    found = decode(save(tmp_path / "p.png", palette, **options), 3)
    near(found, numpy.stack([RAMP, 255 - RAMP, RAMP * 0 + 7], axis=2), 0)


@pytest.mark.parametrize("color", [0, 40, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_shape_in_the_alpha_channel_alone_is_drawn(tmp_path, color, mode, channels):
    shape = Image.fromarray(RAMP)
    if mode == "P":
        image = Image.fromarray(RAMP)
        image.putpalette([color] * 768)
        path = save(tmp_path / "a.png", image, transparency=bytes(range(256)))
    else:
        image = Image.new("L", shape.size, color).convert(mode)
        image.putalpha(shape)
        path = save(tmp_path / "a.png", image)
    ground = 0 if color > 127 else 255
    wanted = ground + (color - ground) * (RAMP / 255)
    near(decode(path, channels), wanted if channels == 1 else grey_in_rgb(wanted))


def test_transparency_is_dropped_where_the_colors_show_the_content(tmp_path):
    for colors, alpha in ((COLORS, RAMP), (COLORS * 0 + 9, RAMP * 0 + 200)):
        image = Image.fromarray(colors)
        image.putalpha(Image.fromarray(alpha))
        near(decode(save(tmp_path / "a.png", image), 3), colors, 0)


def test_wide_pixels_are_scaled_not_cut_off(tmp_path):
    wide = RAMP.astype(numpy.uint16) * 257
    near(decode(save(tmp_path / "16.png", Image.fromarray(wide)), 3), grey_in_rgb(RAMP))
    near(decode(save(tmp_path / "16.tif", Image.fromarray(wide)), 1), RAMP)
    dark = decode(save(tmp_path / "dark.png", Image.fromarray(wide // 4)), 1)
    near(dark, RAMP // 4)
    big = Image.fromarray(RAMP.astype(">u2") * 257)
    near(decode(save(tmp_path / "big.tif", big), 1), RAMP)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (RAMP.astype(numpy.float32) / 255, RAMP),
        (RAMP.astype(numpy.float32), RAMP),
        (RAMP.astype(numpy.int32), RAMP),
        (RAMP.astype(numpy.int32) * 257, RAMP),
        (RAMP.astype(numpy.float32) * 1000 - 5000, RAMP),
        (RAMP.astype(numpy.int32) * -1, 255 - RAMP),
        (numpy.full((4, 4), numpy.nan, numpy.float32), numpy.zeros((4, 4))),
    ],
)
def test_numbers_without_a_range(tmp_path, values, wanted):
    near(decode(save(tmp_path / "x.tif", Image.fromarray(values)), 1), wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_camera(tmp_path, orientation):
    stored = Image.fromarray(COLORS[:8])
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode(save(tmp_path / "x.png", stored, exif=exif), 3)
    assert found.size == ((16, 8) if orientation < 5 else (8, 16))
    if orientation == 3:
        near(found, COLORS[:8][::-1, ::-1], 0)
    if orientation == 6:
        near(found, numpy.rot90(COLORS[:8], -1), 0)


def test_broken_exif_leaves_the_picture(tmp_path):
    path = save(tmp_path / "x.png", Image.fromarray(COLORS), exif=b"Exif\0\0II*\0" + b"\xff" * 20)
    near(decode(path, 3), COLORS, 0)


def test_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.fromarray(numpy.full((4, 4), level, numpy.uint8)) for level in (40, 200)]
    path = save(tmp_path / "x.gif", frames[0], save_all=True, append_images=frames[1:])
    near(decode(path, 1), numpy.full((4, 4), 40), 0)


def bomb(side=60_000):
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + b"\0\0\0\0IDAT\x35\xaf\x06\x1e"
    )


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "the file is empty"),
        (b"no picture", "Pillow doesn't recognize the format"),
        (bomb(), "3600 megapixels exceed the limit of 89"),
        (bomb(13_300), "177 megapixels exceed the limit of 89"),  # by its header alone
        (None, "the file no longer exists"),
        ("a folder", "the path is a folder"),
    ],
)
@pytest.mark.parametrize("read", [probe, lambda path: decode(path, 3)])
def test_what_is_no_picture_is_named(tmp_path, read, content, word):
    path = tmp_path / "x.png"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(CorruptImageError, match=word) as caught:
        read(str(path))
    assert caught.value.where == str(path)
    assert any("--data.skip-corrupt" in line for line in caught.value.hints)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("kind", ["jpeg", "png", "bmp", "gif", "webp", "tiff", "ppm"])
def test_a_picture_cut_short_is_corrupt(kind, tmp_path):
    buffer = io.BytesIO()
    noise = numpy.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(buffer, kind)
    whole = buffer.getvalue()
    for length in range(0, len(whole) * 9 // 10, 61):
        with pytest.raises(CorruptImageError):
            decode("x", 3, whole[:length])


@given(st.sampled_from(["png", "jpeg", "gif", "tiff"]), st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_changed_bytes_never_end_in_another_error(kind, place, change):
    buffer = io.BytesIO()
    Image.fromarray(COLORS).save(buffer, kind)
    content = bytearray(buffer.getvalue())
    start = place % len(content)
    content[start : start + len(change)] = change
    with contextlib.suppress(CorruptImageError):
        assert decode("x", 3, bytes(content)).mode == "RGB"


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


@pytest.mark.parametrize("size", [24, 224])
def test_both_decoders_give_the_same_bits_of_imagenets_pictures(real_data, size):
    """For 24 pixels libjpeg scales nearly all of them down."""
    paths = sorted(real_data("imagenet-sample").rglob("*.JPEG"))
    assert len(paths) == 100
    for number, path in enumerate(paths):
        for draws in (None, SampleRng(7, number)):
            arguments = (str(path), wanted(size), draws, path.read_bytes())
            assert torch.equal(read_picture(*arguments), by_pillow(*arguments)), path


def test_simplejpeg_decodes_plain_jpegs(monkeypatch):
    monkeypatch.setattr(pictures, "decode", None)
    for kind in ("RGB", "L", "progressive", "keep_rgb"):
        read_picture("a.jpg", wanted(), None, stored(kind, 60, 40))


@settings(max_examples=60)
@given(st.floats(0, 1), st.integers(0, 255), st.booleans(), st.one_of(st.none(), st.integers(0, 99)))
def test_damaged_files_are_refused_or_read_alike(place, byte, cut, sample):
    content = bytearray(stored("RGB", 90, 70))
    at = int(place * (len(content) - 1))
    content[at:] = b"" if cut else bytes([byte]) + content[at + 1 :]
    told = []
    for way in (read_picture, by_pillow):
        try:
            draws = None if sample is None else SampleRng(7, sample)
            told.append(way("a.jpg", wanted(), draws, bytes(content)).tolist())
        except CorruptImageError as error:
            told.append(error.message)
    assert told[0] == told[1]


def test_without_simplejpeg_pillow_decodes_and_the_run_says_so(tmp_path):
    (tmp_path / "a.jpg").write_bytes(stored("RGB", 60, 40))
    draws = SampleRng(7, 3)
    torch.save(read_picture(str(tmp_path / "a.jpg"), wanted(), draws), tmp_path / "expected.pt")
    code = """
        import sys
        sys.modules["simplejpeg"] = None  # importing it fails
        import torch
        from manyhands.data import pictures, splits
        from manyhands.data.transforms import SampleRng
        from manyhands.data.transforms import Pixels
        from manyhands.train.data_setup import record_data_notes

        class Journal:
            def event(self, kind, text):
                print(kind, text)

        pixels = Pixels(24, 3, (0.5,) * 3, (0.2,) * 3, "resized-crop-flip")
        found = pictures.read_picture("a.jpg", pixels, SampleRng(7, 3))
        assert torch.equal(found, torch.load("expected.pt"))
        files = splits.ImageFiles(None, torch.zeros(1, dtype=torch.int64))
        record_data_notes(splits.Splits(files, files, ("a",), "", pixels), Journal())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "note JPEGs are decoded with Pillow; simplejpeg is faster (do: pip install simplejpeg)\n"


def test_a_file_that_the_disk_cannot_read_is_a_corrupt_picture():
    with pytest.raises(CorruptImageError, match="Input/output error"):
        read_picture("/proc/self/mem", wanted(), None)


@pytest.mark.parametrize("kind", ["RGB", "L", "turned"])
@pytest.mark.parametrize("sample", [None, 1, 2, 3, 4])
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
    found = read_picture(str(path), wanted(224), draws)
    with Image.open(path) as image:
        image = image.convert("RGB")
        box = crop_box(image.width, image.height, draws)
        image = image.crop(box).resize((224, 224), Image.Resampling.BILINEAR)
    if draws.below(DRAW_MIRROR, 2):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    expected = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("size", [(900, 7), (7, 900), (501, 30), (30, 501)])
def test_the_ends_of_a_long_picture_change_nothing(monkeypatch, size):
    content = stored("png", *size)
    found = read_picture("a.png", wanted(augment="none"), None, content)
    monkeypatch.setattr(pictures, "_MOST_TIMES", 1000)
    whole = read_picture("a.png", wanted(augment="none"), None, content)
    assert (found.int() - whole.int()).abs().max() <= 4


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000)])
def test_a_very_long_picture_takes_no_gigabytes(size):
    pixels, content = wanted(224, augment="none"), stored("png", *size)
    read_picture("a.png", pixels, None, content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KB; resized as a whole it is 9 GB
