#!/usr/bin/env python3
"""`healthy URL`: ends with 0 if the address answers with 200, as the slim images have no curl."""

import sys
import urllib.request

# Never through a proxy: the address is one of the container's own.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(sys.argv[1], timeout=5).close()
