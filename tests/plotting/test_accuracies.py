import pytest

from escnn_attention.plotting import plot_accuracies
from tests.plotting.pictures import drawn

pytest.importorskip("matplotlib")


def test_accuracies():
    accuracies = {"one": {"upright": 1.0, "turned": 0.25}, "other": {"upright": 0.5, "turned": 0.5}}
    figure = plot_accuracies(accuracies, title="Who knows", note="of four")
    assert drawn(figure) > 1000
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "other"]
    assert sorted(tuple(point) for marks in ax.collections for point in marks.get_offsets()) == [
        (25.0, 0.0),
        (50.0, 1.0),
        (50.0, 1.0),
        (100.0, 0.0),
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["upright", "turned"]


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="empty"):
        plot_accuracies({})
