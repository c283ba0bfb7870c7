#!/usr/bin/env python3
"""`healthy URL`: ends with 0 if the address answers with 200. Never through a proxy; the slim
images have no curl."""

import sys
import urllib.request

urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=5).close()
