"""A run that was killed leaves a folder, and the next run removes it; a live run's stays."""

from baton_cluster.scratch import scratch_folder


def test_a_left_folder_goes_and_a_live_one_stays(tmp_path):
    left = tmp_path / "bn-left"
    (left / "n").mkdir(parents=True)
    (left / "lock").touch()
    other = tmp_path / "other"
    other.mkdir()
    with scratch_folder(tmp_path) as mine:
        assert not left.exists()
        with scratch_folder(tmp_path) as second:
            assert mine.is_dir()
            assert second != mine
        assert mine.is_dir()
    assert list(tmp_path.iterdir()) == [other]
