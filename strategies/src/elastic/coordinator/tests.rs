//! What only the composition does; the simulator of `phalanx-chaos` does the rest.
