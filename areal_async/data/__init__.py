"""From the data sets of the field to files that a job takes, and what is wrong with such a file."""
