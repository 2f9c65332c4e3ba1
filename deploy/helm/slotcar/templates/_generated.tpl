{{/*
The certificate of mode `generated`, as JSON: the one that the cluster has while that lasts, else a new one of a new
authority. The caBundle then has the authority before too, so that replicas that still serve the old one are trusted. No
authority's key is kept. Without a cluster to look at, each rendering has another.
*/}}
{{- define "slotcar.generated" -}}
{{- $wanted := .Values.tls.generated -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "slotcar.secret" .) | default dict -}}
{{- $data := $found.data | default dict -}}
{{- $notes := dig "metadata" "annotations" dict $found -}}
{{- $now := now | unixEpoch | int64 -}}
{{- $renewAfter := index $notes "slotcar.dev/renew-after" | default "0" | int64 -}}
{{- $generation := index $notes "slotcar.dev/generation" | default "0" | int64 -}}
{{- $isWhole := and (hasKey $data "ca.crt") (hasKey $data "tls.crt") (hasKey $data "tls.key") -}}
{{- if and $isWhole (lt $now $renewAfter) (eq $generation (int64 $wanted.generation)) -}}
{{- dict "ca.crt" (index $data "ca.crt") "tls.crt" (index $data "tls.crt") "tls.key" (index $data "tls.key") "renewAfter" (toString $renewAfter) "generation" (toString $generation) | toJson -}}
{{- else -}}
{{- $days := int64 $wanted.days | int -}}
{{- $names := include "slotcar.dnsNames" . | fromJsonArray -}}
{{- /* Each authority has a name of its own: a verifier looks them up by name. */ -}}
{{- $authority := genCAWithKey (printf "slotcar-injector CA %d" $now) $days (genPrivateKey "ecdsa") -}}
{{- $pair := genSignedCertWithKey (first $names | trunc 60) nil $names $days $authority (genPrivateKey "ecdsa") -}}
{{- $before := index $data "ca.crt" | default "" | b64dec | regexFind "(?s)-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----" -}}
{{- $bundle := list (trim $authority.Cert) $before | compact | join "\n" | printf "%s\n" -}}
{{- $lasting := mul (sub $wanted.days $wanted.renewDays | int64) 86400 -}}
{{- dict "ca.crt" (b64enc $bundle) "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key) "renewAfter" (add $now $lasting | toString) "generation" (int64 $wanted.generation | toString) | toJson -}}
{{- end -}}
{{- end }}
