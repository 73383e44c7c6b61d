"""One HTML file that says what was measured: evaluations beside the paper's figures, and a run as a whole."""
