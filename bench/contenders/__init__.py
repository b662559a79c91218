"""The DDP introduction's job written for each tool: MNIST, 784-256-10, SGD, 32 pictures a step on each of 2 processes.

Each script prints one line of JSON: how many images a second all processes together learnt from, once warm.
"""
