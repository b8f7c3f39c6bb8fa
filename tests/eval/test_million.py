"""The single layer with many keys, here with few."""

import pytest

from certjax.eval import million


def test_rows_and_table(quick_compilation, capsys):
    rows = million.run(4096, k=256)
    error = {(row["sigma"], row["method"]): row["error"] for row in rows}
    for sigma in million.SIGMAS:
        assert error[sigma, "dense"] == 0
        assert error[sigma, "certified, ε = 0.1"] < 0.1
        assert 0 < error[sigma, "SoftmaxLift, Flat, k = 256"] < 0.2
    assert all(row["seconds"] > 0 for row in rows)
    table = million.table(rows, 4096)
    assert table.count("\n") == 3 + len(rows)
    assert million.main(["--n", "100"]) == 2
    assert "multiple of 64" in capsys.readouterr().err


def test_needs_more_keys_than_the_window():
    with pytest.raises(ValueError, match="above 1025: got 1024"):
        million.run(1024)
