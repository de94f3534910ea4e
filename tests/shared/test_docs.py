"""Pages that are written from the code are as the code says."""

from docs import make_metrics, make_run_file


def test_the_page_of_the_run_file_is_up_to_date():
    assert make_run_file.PAGE.read_text() == make_run_file.render(), "run `python -m docs.make_run_file`"


def test_the_page_of_the_metrics_is_up_to_date():
    assert make_metrics.PAGE.read_text() == make_metrics.render(), "run `python -m docs.make_metrics`"
