"""Virtual devices for benchmarks that compile for more devices than there are."""


def make_devices(count: int) -> None:
    """The CPU backend with virtual devices, also where there is an accelerator; too late once jax has started."""
    import jax

    from axonn_jax import compat

    if not compat.backends_started():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
