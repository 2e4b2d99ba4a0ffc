//! The engine against a sink that is made up: chosen situations, and random ones in `model`.

mod bisection;
mod model;
mod outage;
mod partial;
mod poison;
mod progress;
mod remembering;
mod sink;
mod world;
