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


@pytest.mark.parametrize(
    ("accuracies", "error", "message"),
    [
        ({}, ValueError, "accuracies: got none"),
        ({"one": {}}, ValueError, "got 0 conditions for 'one', needed 1 to 8"),
        ({"one": {str(i): 0.5 for i in range(9)}}, ValueError, "got 9 conditions for 'one', needed 1 to 8"),
        ({"one": {"a": 0.5}, "two": {"b": 0.5}}, ValueError, r"got the conditions \['b'\] for 'two', needed \['a'\]"),
        ({"one": {"a": 0.5}, "two": {}}, ValueError, "got 0 conditions for 'two'"),
        ({"one": {"a": 97.0}}, ValueError, "got 97.0 for 'one', 'a', needed a number from 0 to 1"),
        ([0.5], TypeError, "accuracies: got list"),
        ({"one": 0.5}, TypeError, "accuracies: got float for 'one'"),
    ],
)
def test_mistakes_are_named(accuracies, error, message):
    with pytest.raises(error, match=message):
        plot_accuracies(accuracies)


def test_as_many_conditions_as_colours():
    (ax,) = plot_accuracies({"one": {str(i): i / 8 for i in range(8)}}).axes
    assert len({tuple(marks.get_edgecolor()[0]) for marks in ax.collections}) == 8
