"""Shows a report: as one screen of text, as a matrix, as a web page, as a Perfetto trace."""
