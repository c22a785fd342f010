"""The runner of the GPU tests, on tests that need none."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import gpu_tier

FAKE = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture(scope="module", autouse=True)
def report(request):
    yield
    plugins = request.config.pluginmanager
    terminal = plugins.getplugin("terminalreporter")
    for line in (
        "H200, jax 9, 2 cases right",
        "triton bfloat16: 2, error at most 0.25 of allowed (x)",
        "triton, 7 passes: 7 bit-equal",
    ):
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(line)

@pytest.mark.parametrize("i", range(4))
def test_good(i):
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"

def test_hangs():
    time.sleep(600)

def test_dies():
    os._exit(9)

def test_bad():
    assert 1 == 2, "one is not two"

def test_offsets_past_32_bits():
    pass

def test_last():
    pass
"""


def test_all_ends_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tier, "ROOT", tmp_path)
    path, out = tmp_path / "test_fake.py", tmp_path / "summary.txt"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    path.write_text(FAKE)
    asked = [str(path), "--processes", "3", "--stall", "5", "--out", str(out)]
    assert gpu_tier.main(asked) == 1
    text = out.read_text()
    name = "test_fake.py"
    assert "6 passed" in text
    assert "1 failed" in text
    assert "2 hung or died" in text
    failed, hung = (text.split(title)[1].split("\n\n")[0] for title in ("Failed:", "Hung or died:"))
    assert f"{name}::test_bad: " in failed
    assert "one is not two" in failed
    assert f"{name}::test_hangs" in hung
    assert f"{name}::test_dies" in hung
    assert "error at most 0.25 of what the rule allows (x)" in text
    assert "triton, 7 passes: 7 bit-equal" in text
    assert "jax 9" in text

    assert gpu_tier.main([*asked, "-k", "good or last"]) == 0
    assert "5 passed" in out.read_text()
    assert gpu_tier.main([*asked, "-k", "hangs", "--limit", "8", "--stall", "60"]) == 1
    assert "1 not reached" in out.read_text()


def test_large_tests_share_a_process():
    ids = [f"f::test_{i}" for i in range(7)] + [
        "f::test_past_32_bits[a]",
        "f::test_past_16_bits[b]",
    ]
    hands = gpu_tier.deal(ids, 3)
    assert hands[0] == ids[7:]
    assert sorted(i for hand in hands for i in hand) == sorted(ids)
    assert len(hands) == 3
    assert len(gpu_tier.deal(ids[:2], 5)) == 2
