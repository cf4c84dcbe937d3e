#!/bin/bash
echo release 1.9
