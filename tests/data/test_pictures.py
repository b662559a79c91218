"""Pictures in files: by whatever route they are decoded, their pixels are the same."""

import io
import resource
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.data import pictures
from manyhands.data.decode import CorruptImageError
from manyhands.data.pictures import read_picture
from manyhands.data.transforms import DRAW_MIRROR, Pixels, SampleRng, crop_box

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
        from manyhands.train.data_setup import record_skipped

        class Journal:
            def event(self, kind, text):
                print(kind, text)

        pixels = Pixels(24, 3, (0.5,) * 3, (0.2,) * 3, "resized-crop-flip")
        found = pictures.read_picture("a.jpg", pixels, SampleRng(7, 3))
        assert torch.equal(found, torch.load("expected.pt"))
        files = splits.ImageFiles(None, torch.zeros(1, dtype=torch.int64))
        record_skipped(splits.Splits(files, files, ("a",), "", pixels), Journal())
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
