"""Files that are written whole or not at all, whoever else writes them."""

from manyhands.core.once import replacing


def test_two_that_write_one_file_at_a_time_do_not_write_into_each_other(tmp_path):
    file = tmp_path / "file"
    with replacing(file) as one:
        one.write_text("first")
        with replacing(file) as other:
            other.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
