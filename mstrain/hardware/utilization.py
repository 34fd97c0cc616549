"""Model FLOP/s utilization (MFU)."""


def mfu(flops_per_step: float, step_seconds: float, devices: int, peak: float | None) -> float | None:
    """Model FLOPs of a step over the FLOPs that `devices` with `peak` FLOP/s each can compute in `step_seconds`.

    `flops_per_step` counts the whole job and no recomputation (PaLM paper, appendix B).
    Returns a fraction in [0, 1], or None if the peak is unknown.
    Raises ValueError for a fraction above 1, because the time or the peak is then wrong.
    """
    if step_seconds <= 0 or devices < 1 or flops_per_step < 0:
        raise ValueError(
            f"mfu needs a positive time, at least one device and FLOPs >= 0, not {step_seconds} s, "
            f"{devices} devices, {flops_per_step} FLOPs"
        )
    if peak is None:
        return None
    fraction = flops_per_step / (step_seconds * devices * peak)
    if fraction > 1.0:
        raise ValueError(
            f"MFU of {fraction:.1%} is impossible ({flops_per_step:.4g} FLOPs in {step_seconds:.4g} s on "
            f"{devices} x {peak:.4g} FLOP/s): the measurement or the peak is wrong; wait for the "
            f"device before reading the clock, and check the chip's entry in mstrain/hardware/chips.toml"
        )
    return fraction
