"""What is compared between machines and what is copied to them is one set of files."""

import base64
import stat
import subprocess

import pytest

from manyhands.cluster.code_files import read_code_files, write_code
from manyhands.cluster.doctor import facts


@pytest.fixture
def folder(tmp_path):
    for name in ("net.py", "conf/a.yaml", ".hidden/x.py", "env/lib/x.py", "runs/x.py", "old/job.toml", "old/net.py",
                 "big.json", "labels.txt", "picture.png", ".d.py", "ignored.py", "node_modules/x.json"):  # fmt: skip
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * (2 << 20) if name == "big.json" else name)
    (tmp_path / "work" / "env" / "pyvenv.cfg").touch()
    (tmp_path / "work" / "old" / "ranks").mkdir()
    return tmp_path / "work"


def test_both_look_at_the_same_files(folder, monkeypatch):
    compared = set(facts.hash_code_files(folder)["files"])
    assert compared == {"net.py", "conf/a.yaml", "ignored.py"}
    carried, left = read_code_files(folder)
    assert not left
    assert set(carried) == compared | {"labels.txt"}
    monkeypatch.setattr(facts, "MOST_FOLDERS", 0)
    assert facts.hash_code_files(folder)["whole"] is False
    assert facts.hash_code_files(folder / "nowhere")["exists"] is False


def test_what_git_ignores_is_not_copied_and_its_configuration_runs_nothing(folder):
    marker = folder / "ran"
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "-C", folder, "config", "core.fsmonitor", f"touch {marker}; true"], check=True)
    (folder / ".gitignore").write_text("ignored.py\n")
    carried, _ = read_code_files(folder)
    assert "ignored.py" not in carried
    assert "net.py" in carried
    assert not marker.exists()


SECRETS = ["kaggle.json", ".netrc", "id_rsa", "id_ed25519_work", ".env", "conf/prod.env", "server.pem", "secrets.yaml",
           "aws_credentials.ini", "conf/service-account.json", "api_keys.toml", "hub_token.txt"]  # fmt: skip
HARMLESS = ["tokenizer.json", "special_tokens.json", "environment.yml", "keys.py", "credentials.py",
            "monkey.json", "id_mapping.json"]  # fmt: skip


def test_passwords_and_keys_stay_here_and_that_is_said(folder):
    for name in [*SECRETS, *HARMLESS]:
        (folder / name).write_text("{}")
    (folder / "mine.json").write_text('{"type": "service_account", "project": "x"}')
    (folder / "deploy.txt").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nxyz")
    carried, left = read_code_files(folder)
    assert not {*SECRETS, "mine.json", "deploy.txt"} & set(carried)
    assert set(HARMLESS) <= set(carried)
    (line,) = left
    assert f" and {len(SECRETS) + 2 - 6} more; " in line


def test_what_lies_elsewhere_stays_there_and_that_is_said(folder):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "hosts.txt").write_text("not ours")
    (folder / ".private").mkdir()
    (folder / ".private" / ".pw").write_text("x")
    (folder / "hosts.txt").symlink_to(outside / "hosts.txt")
    (folder / "more").symlink_to(outside)
    (folder / "up.txt").symlink_to("../outside/hosts.txt")
    (folder / "pw.txt").symlink_to(".private/.pw")
    (folder / "same.py").symlink_to("net.py")
    (folder / "gone.py").symlink_to("nowhere.py")
    carried, left = read_code_files(folder)
    assert "same.py" in carried
    assert not {"hosts.txt", "up.txt", "pw.txt", "more/hosts.txt"} & set(carried)
    assert set(facts.hash_code_files(folder)["files"]) == set(carried) - {"labels.txt"}
    hints = "; if the job needs these files, copy them yourself"
    assert sorted(left) == [
        f"--sync-code skips files that link to files outside the folder: hosts.txt, up.txt{hints}",
        f"--sync-code skips files that may contain passwords or keys: pw.txt{hints}",
    ]


def test_the_copy_is_its_users_alone_and_as_it_was_sent(tmp_path, monkeypatch):
    place = tmp_path / "code" / "0123"
    place.mkdir(parents=True)
    (place / "net.py").write_text("changed by a job")
    write_code(place, {"net.py": base64.b64encode(b"as sent").decode(), "a/b.py": ""})
    assert (place / "net.py").read_text() == "as sent"
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(place.parent.stat().st_mode) == 0o700
