"""The viewer in the browser, reports and exports of a run."""
