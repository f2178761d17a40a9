"""One file per system; `registry` names them."""
