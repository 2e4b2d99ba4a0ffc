//! Lanes beside an engine that is isolated by key, against a sink that is made up: chosen situations, and random ones in `model`.

mod model;
mod situations;
mod world;
