"""Files of the UCI digits data set; SOURCE.md says where they come from."""
