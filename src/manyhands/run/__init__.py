"""The functions behind the commands and the Python interface. Importing these modules does not import torch."""
