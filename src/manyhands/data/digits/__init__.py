"""Files of the digits data set; SOURCE.md names their source."""
