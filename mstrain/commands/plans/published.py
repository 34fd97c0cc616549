"""Published training runs: predicted, measured, and their ratio."""

from dataclasses import dataclass

from mstrain.checks import mounted
from mstrain.commands.plans.output import console, make_folder
from mstrain.planner.published.predict import predict
from mstrain.planner.published.report import (
    closing_line,
    errors_table,
    plot_published,
    published_table,
    sources_table,
    write_published,
)
from mstrain.planner.published.rows import read_rows


@dataclass(frozen=True)
class PublishedConfig:
    """Predictions of published runs."""

    file: str = ""
    """JSON file of the runs; type published=FILE."""
    run_dir: str = "runs/plan_published"
    """Folder of published.csv, published.json and published.png."""

    def __post_init__(self):
        mounted("run_dir", self.run_dir)


def run_file(config: PublishedConfig) -> int:
    """Predicts every row as stated, prints the table, and writes it with a plot."""
    rows = read_rows(config.file)
    folder, say = make_folder(config.run_dir), console()
    predictions = [predict(row) for row in rows]
    write_published(predictions, folder)
    plot_published(predictions, folder / "published.png")
    say.print(published_table(predictions))
    say.print(closing_line(predictions))
    for prediction in predictions:
        for note in prediction.row.notes:
            say.print(f"{prediction.row.name}: {note}")
    say.print(errors_table(predictions))
    say.print(sources_table(predictions))
    say.print(f"published.csv, published.json and published.png in {folder}")
    return 0
