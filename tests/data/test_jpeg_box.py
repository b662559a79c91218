"""What is decoded of a JPEG alone has the pixels that Pillow gives of the whole; what isn't usual is left to others."""

import io
import os

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.data import jpeg_box, places
from manyhands.data.jpeg_box import box_decoder, resized


@pytest.fixture(scope="module", autouse=True)
def decoder():
    found = box_decoder()
    if found is None:
        pytest.skip(f"NOT SHOWN: {jpeg_box.NO_COMPILER}")
    return found


def stored(seed, width, height, mode="RGB", **options):
    values = numpy.random.default_rng(seed).integers(0, 256, (height // 7 + 2, width // 9 + 2, 3), dtype=numpy.uint8)
    picture = Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    content = io.BytesIO()
    picture.save(content, "JPEG", **options)
    with Image.open(content) as image:
        whole = torch.from_numpy(numpy.array(image)).view(height, width, -1).permute(2, 0, 1)
    return content.getvalue(), whole


def decoded(content, box, channels, size=None, *, mirrored=False):
    """The box, or None where it is left to others."""
    high, wide = size or (box[3] - box[1], box[2] - box[0])
    out = torch.empty((channels, high, wide), dtype=torch.uint8)
    return out if box_decoder()(content, box, out, mirrored=mirrored) else None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_box_has_pillows_pixels_and_torchs_when_resized(data):
    width, height = data.draw(st.tuples(st.integers(6, 90), st.integers(1, 90)))
    left, top = data.draw(st.tuples(st.integers(0, width - 1), st.integers(0, height - 1)))
    right, bottom = data.draw(st.tuples(st.integers(left + 1, width), st.integers(top + 1, height)))
    options = {
        "quality": data.draw(st.sampled_from([5, 30, 75, 95])),
        "subsampling": data.draw(st.sampled_from([0, 1, 2])),
        "optimize": data.draw(st.booleans()),
        "restart_marker_blocks": data.draw(st.sampled_from([0, 1, 3, 8])),
    }
    mode = data.draw(st.sampled_from(["RGB", "L"]))
    content, whole = stored(data.draw(st.integers(0, 9)), width, height, mode, **options)
    size = data.draw(st.sampled_from([None, (24, 24), (97, 40), (1, 70)]))
    channels, mirrored = data.draw(st.integers(len(whole), 3)), data.draw(st.booleans())
    found = decoded(content, (left, top, right, bottom), channels, size, mirrored=mirrored)
    part = whole[:, top:bottom, left:right]
    high, wide = size or part.shape[1:]
    if found is None:  # contrast beyond what all libraries compute alike, or much smaller than it was
        assert options["quality"] == 5 or part.shape[1] > 3 * high or part.shape[2] > 3 * wide
    else:
        expected = resized(part, high, wide)
        assert torch.equal(found, (expected.flip(2) if mirrored else expected).expand(channels, -1, -1))


@pytest.mark.parametrize("side", [10, 50, 111, 112, 223, 224, 225, 300, 448, 449, 671, 800])
def test_what_is_resized_to_a_usual_size_has_torchs_pixels(side):
    content, whole = stored(side, side, 850 - side)
    assert torch.equal(decoded(content, (0, 0, side, 850 - side), 3, (224, 224)), resized(whole, 224, 224))


def test_a_header_tells_what_the_picture_is(decoder):
    content, _ = stored(0, 60, 40)
    header = decoder.header(content)
    assert (header.width, header.height, header.channels, header.turned) == (60, 40, 3, False)
    assert decoder.header(stored(0, 60, 40, "L")[0]).channels == 1
    assert decoder.header(content[:100]) is None


def test_codes_of_the_picture_before_are_not_those_of_this(decoder):
    first, second = (stored(seed, 60, 40, optimize=True) for seed in (0, 1))
    for content, whole in (first, second, first):
        assert torch.equal(decoded(content, (0, 0, 60, 40), 3), whole)
    # Without tables of its own a picture has none.
    at = second[0].index(b"\xff\xc4")
    bare = second[0][:at] + second[0][second[0].index(b"\xff\xda") :]
    assert decoded(bare, (0, 0, 60, 40), 3) is None


@pytest.mark.parametrize("options", [{"progressive": True}, {"mode": "CMYK"}])
def test_what_isn_t_usual_is_left_to_others(decoder, options):
    content, whole = stored(0, 60, 40, **options)
    assert decoded(content, (0, 0, 60, 40), len(whole)) is None


def test_a_file_that_is_cut_short_anywhere_is_left_to_others(decoder):
    content, _ = stored(0, 60, 40)
    for length in range(len(content)):
        assert decoded(content[:length], (0, 0, 20, 8), 3) is None


def pillows(content):
    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(numpy.array(image))


@pytest.mark.parametrize("step", [2, 7, 9, 16, 20, 31, 32, 200])
def test_brightness_beyond_what_libraries_compute_alike_is_left_to_others(step):
    for white in (0, 255):
        content = io.BytesIO()
        Image.new("L", (8, 8), white).save(content, "JPEG", quality=100)
        changed = bytearray(content.getvalue())
        changed[changed.index(b"\xff\xdb") + 5] = step
        found = decoded(bytes(changed), (0, 0, 8, 8), 1)
        assert found is None or torch.equal(found[0], pillows(changed))


@pytest.mark.parametrize("sampling", [0x01, 0x10, 0x15, 0x51])
def test_what_others_refuse_is_not_decoded(sampling):
    content = bytearray(stored(0, 60, 40, "L")[0])
    content[content.index(b"\xff\xc0") + 11] = sampling
    with pytest.raises(OSError, match="broken data stream"):
        pillows(content)
    assert decoded(bytes(content), (0, 0, 60, 40), 1) is None


@pytest.mark.parametrize("box", [(-1, 0, 5, 5), (0, 0, 61, 5), (5, 0, 5, 5), (0, 6, 5, 5), (0, 0, 5, 41)])
def test_a_box_beyond_the_picture_is_refused(decoder, box):
    content, _ = stored(0, 60, 40)
    out = torch.zeros((3, 8, 8), dtype=torch.uint8)
    taps = jpeg_box._taps(8, 8)[0]
    assert decoder._decode(content, len(content), *box, taps, taps, 3, 8, 8, False, out.data_ptr()) == 1
    assert not out.any()


def test_without_a_compiler_there_is_none_and_pictures_are_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    box_decoder.cache_clear()
    try:
        assert box_decoder() is None
    finally:
        box_decoder.cache_clear()


def decoder_with(monkeypatch, cache):
    """The decoder as a process finds it that begins with this cache."""
    monkeypatch.setenv("MANYHANDS_CACHE", str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "own"))
    box_decoder.cache_clear()
    try:
        return box_decoder()
    finally:
        box_decoder.cache_clear()


@pytest.mark.parametrize(
    "where", ["file", pytest.param("folder", marks=pytest.mark.slow), pytest.param("above", marks=pytest.mark.slow)]
)
def test_what_others_can_write_to_is_not_loaded(decoder, monkeypatch, tmp_path, where):
    cache = tmp_path / "cache"
    assert decoder_with(monkeypatch, cache)
    (library,) = (cache / "native").glob("*.so")
    assert library.stat().st_mode & 0o022 == library.parent.stat().st_mode & 0o022 == 0
    library.unlink()  # it is mapped
    library.write_bytes(b"not a library")
    library.chmod(0o700)
    {"file": library, "folder": library.parent, "above": cache}[where].chmod(0o777)
    assert decoder_with(monkeypatch, cache)
    assert (library.read_bytes() == b"not a library") == (where != "file")
    assert bool(list((tmp_path / "own").rglob("*.so"))) == (where != "file")


OWN, OTHER = os.getuid(), os.getuid() + 1


@pytest.mark.parametrize(
    ("mode", "user", "group", "moved"),
    [
        (0o755, OWN, OTHER, False),
        (0o755, 0, 0, False),
        (0o755, OTHER, OWN, True),
        (0o1777, 0, 0, False),
        (0o1777, OTHER, 0, True),
        (0o777, OWN, OWN, True),
        (0o775, OWN, OWN, False),
        (0o775, OWN, OTHER, True),
        (0o1775, OWN, OTHER, False),
    ],
)
def test_whose_folder_it_lies_in_and_who_writes_there_counts(mode, user, group, moved):
    assert places.others_move(os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))) == moved


def test_more_channels_than_a_picture_has_are_refused(decoder):
    content, _ = stored(0, 60, 40)
    out = torch.zeros((4, 8, 8), dtype=torch.uint8)
    taps = jpeg_box._taps(8, 8)[0]
    assert decoder._decode(content, len(content), 0, 0, 8, 8, taps, taps, 4, 8, 8, False, out.data_ptr()) == 1
    assert not out.any()


def test_a_library_behind_a_link_is_made_anew(decoder, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    assert decoder_with(monkeypatch, cache)
    (library,) = (cache / "native").glob("*.so")
    library.rename(tmp_path / "elsewhere")
    library.symlink_to(tmp_path / "elsewhere")
    assert decoder_with(monkeypatch, cache)
    assert not library.is_symlink()
