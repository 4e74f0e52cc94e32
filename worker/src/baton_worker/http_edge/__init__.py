"""HTTP listeners that no peer can exhaust: bounds on sizes, time and connections."""
