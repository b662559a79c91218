"""One file for each thing that the doctor looks at; none imports another."""
