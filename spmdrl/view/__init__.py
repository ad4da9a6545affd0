"""A page to read runs and rollouts: python -m spmdrl.view RUN [RUN ...]"""
