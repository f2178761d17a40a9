#!/bin/sh
# Starts HAProxy for Ray Serve with -dS: no splicing. With `option splice-request`, which Ray Serve configures, a client
# that leaves is not noticed when its headers and body came in separate segments, and its request runs on.
exec "${CONFLUX_HAPROXY_BINARY:-haproxy}" -dS "$@"
