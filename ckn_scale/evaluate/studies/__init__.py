"""The paper's studies: each a list of settings that are changed one at a time, measured on a data set."""
