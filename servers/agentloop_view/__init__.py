"""The browser viewer, and the reports and exports of a run."""
