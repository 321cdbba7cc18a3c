"""One driver at a time for a run in a bucket."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.buckets import Bucket
from vla_finetuning.buckets.mirror import address, as_path
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.programs import Config
from vla_finetuning.run import lease
from vla_finetuning.run.attempts import attempts, start_attempt
from vla_finetuning.run.folder import claim_folder, own_folder, prepare_folder
from vla_finetuning.run.lease import drive, is_lost

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(bucket_url, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    monkeypatch.setattr(lease, "LOOK_S", 0.1)
    return as_path(bucket_url)


def test_second_driver_is_refused_while_the_first_lives(folder):
    with drive(folder):
        started = time.monotonic()
        with pytest.raises(FileExistsError, match=r"a run is going on there, driven by process \d+ on .*; wait until"):
            lease._Lease(folder).take()
        assert time.monotonic() - started < lease.LEASE_S
    with drive(folder):  # it said that it ended
        assert not is_lost(folder)


def test_one_of_three_concurrent_drivers_gets_the_lease(folder):
    drivers, refused, barrier = [], [], threading.Barrier(3)

    def attempt():
        driver = lease._Lease(folder)
        barrier.wait()
        try:
            driver.take()
            drivers.append(driver)
        except FileExistsError as error:
            refused.append(error)

    with drive(folder):
        pass
    threads = [threading.Thread(target=attempt) for _ in range(3)]
    for thread in threads:
        thread.start()
    # Renew the lease as long as the others look.
    while any(thread.is_alive() for thread in threads):
        for driver in drivers:
            assert driver.renew()
        time.sleep(0.1)
    assert len(drivers) == 1 and len(refused) == 2


def test_lease_of_killed_driver_expires(folder, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    code = (
        "import sys, time; from vla_finetuning.buckets.mirror import as_path\n"
        "from vla_finetuning.run.lease import drive\n"
        "with drive(as_path(sys.argv[1])): print('driving', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, address(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "driving\n"
    process.kill()
    process.wait()
    started = time.monotonic()
    with drive(folder):
        assert time.monotonic() - started >= lease.LEASE_S
    assert not is_lost(folder)


def test_driver_ends_if_its_lease_is_taken(folder, faults, capsys):
    """As after a loss of the store for longer than its lease."""
    ended = threading.Event()
    with drive(folder, when_lost=ended.set):
        other = lease._Lease(folder)
        other._put(other._read()[1])
        assert ended.wait(30) and is_lost(folder)
    assert "another process drives this run now" in capsys.readouterr().err
    assert other.renew(), "what it leaves is the other's"


@pytest.mark.parametrize("fault", ["503", "lost", "reset"])
def test_lease_survives_store_failures(folder, faults, fault, monkeypatch):
    with drive(folder, when_lost=lambda: pytest.fail("lost")):
        renewed, failed = threading.Event(), []

        def choose(request):
            if request.method == "PUT" and len(failed) < 3:
                failed.append(request)
                return fault
            if request.method == "PUT":
                renewed.set()
            return None

        faults.choose = choose
        assert renewed.wait(60) and not is_lost(folder)


@pytest.mark.parametrize("ignored", [("if-match",), ("if-none-match", "if-match")])
def test_store_without_conditional_writes_requires_lease_false(folder, faults, ignored, capsys):
    """Some stores ignore both conditions of a put, others only if-match."""
    faults.ignored = ignored
    config, bucket = Config(output_dir=address(folder)), Bucket(address(folder))
    message = r"this store overwrites what it was asked not to \(no conditional writes\).*--lease=false"
    for refused in (config, replace(config, dry_run=True)):
        with pytest.raises(OSError, match=message), own_folder(refused, None, 4, 0):
            pass
    assert not bucket.names()
    config = replace(config, lease=False)
    with own_folder(replace(config, dry_run=True), None, 4, 0):
        pass
    assert capsys.readouterr().out.startswith("Lease        none (--lease=false)") and not bucket.names()
    with own_folder(config, None, 4, 0):
        prepare_folder(config)
        assert start_attempt(folder, 0, 1) == 0 and start_attempt(folder, 0, 1) == 1
    assert ".lock" not in bucket.names()
    assert len(attempts(folder)) == 2


def test_folder_on_a_disk_is_locked_without_a_lease(tmp_path, capsys):
    flags = ["--dataset.root=/data", "--policy.path=/base", f"--output_dir={tmp_path / 'run'}", "--lease=false"]
    config = parse_args(flags)
    with own_folder(config, None, 4, 0), pytest.raises(FileExistsError), own_folder(config, None, 4, 0):
        pass
    assert "Lease" not in capsys.readouterr().out


def test_claimed_bucket_folder_is_removed_if_empty(folder):
    bucket = Bucket(address(folder))
    with claim_folder(folder):
        assert bucket.names() == {".lock"}
    assert not bucket.names()
