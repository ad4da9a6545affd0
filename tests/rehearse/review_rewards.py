"""Reward functions of tests, in a file of their own: their worker imports it, and no torch."""


def good(response, ground_truth):
    return float(response.strip() == ground_truth)


def constant(response, ground_truth):
    return 0.0


def upside_down(response, ground_truth):
    return float(response.strip() != ground_truth)


def formatted(response):
    return float(response.startswith("<answer>"))


def boxed(response, ground_truth):
    return float(f"\\boxed{{{ground_truth}}}" in response)


def fragile(response, ground_truth):
    return float(int(response) == int(ground_truth))


def percent(response, ground_truth):
    return 100.0 * (response.strip() == ground_truth)
